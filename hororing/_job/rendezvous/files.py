"""A directory that all hosts share, in which ranks find the store.

Rank 0 writes its offer (_job/rendezvous/offers.py) into a file that only its user can read, and
removes it when all ranks have connected. The directory may contain files of earlier jobs: they have
another job's name, their owner is dead, or no store answers with that secret.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from hororing._job import private_folder
from hororing._job.rendezvous import offers, protocol
from hororing._job.rendezvous.client import Member, RendezvousError
from hororing._job.rendezvous.offers import Offer
from hororing._job.rendezvous.patience import Patience
from hororing._job.rendezvous.protocol import ProtocolError


def place(directory: str | Path, job: str) -> Path:
    """The path of a job's file."""
    return Path(directory) / f"hororing-{job}.json"


def serve(
    directory: str | Path, *, job: str, size: int, timeout_s: float, one_host: bool = False
) -> Member:
    """Start the store in this process, rank 0, write its address, and connect.

    Raises
    ------
    OSError : the file cannot be written; another user may have taken its name.
    RendezvousError : a job of that name is starting.
    """
    path = place(directory, job)
    found, reason = _read(path)
    if found is not None and _is_alive(found["owner"]):
        raise RendezvousError(
            f"{path} belongs to a running job (pid {found['owner'].get('pid')}): give each start "
            "of a job another HORORING_JOB"
        )

    published = False

    def publish(offer: Offer) -> None:
        nonlocal published
        text = json.dumps({**offer, "owner": _owner(os.getpid())})
        try:
            private_folder.publish(path, text.encode(), replace=True)
        except OSError as error:
            if os.path.lexists(path):
                raise PermissionError(error.errno, reason) from None
            raise
        published = True

    def withdraw() -> None:
        if published:
            with contextlib.suppress(OSError):
                path.unlink()

    return offers.make(
        publish, withdraw, job=job, size=size, timeout_s=timeout_s, one_host=one_host
    )


def join(
    directory: str | Path, *, job: str, rank: int, size: int, timeout_s: float,
    patience: Patience | None = None,
) -> Member:  # fmt: skip
    """Wait for the file, and connect. RendezvousError at the deadline."""
    path = place(directory, job)
    return offers.accept(
        lambda: _read(path), rank=rank, size=size, timeout_s=timeout_s, patience=patience
    )


def _read(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the offer in the file; or None, and why a live job has none."""
    with contextlib.suppress(OSError):
        # Makes NFS forget that the file did not exist a moment ago.
        os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        found = offers.parse(private_folder.read(path))
        owner = protocol.take(found, "owner", dict)
    except OSError as error:
        return None, private_folder.describe(error, path)
    except ProtocolError:
        return None, f"{path} is not understood"
    if _is_alive(owner) is False:
        return None, f"{path} belongs to a job that has ended"
    return found, ""


def _owner(pid: int) -> dict[str, Any]:
    """Return an identity that no other process of this machine has had since boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return {
        "pid": pid,
        "began": began(pid),
        "space": f"{boot} {os.readlink('/proc/self/ns/pid')}",
    }


def began(pid: int) -> int | None:
    """Return the process's start time, in the kernel's ticks, or None if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return None
    return None if not fields or fields[0] in (b"Z", b"X") else int(fields[19])


def _is_alive(owner: dict[str, Any]) -> bool | None:
    """Whether the owner is alive; None if it is on another host or in another container."""
    pid = owner.get("pid")
    if type(pid) is not int:
        return None
    now = _owner(pid)
    if owner.get("space") != now["space"]:
        return None
    return now["began"] is not None and owner.get("began") == now["began"]
