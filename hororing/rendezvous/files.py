"""A directory that all hosts share, as the place where ranks find the store.

Rank 0 writes where its store is, and the secret, into a file that only its user can read. Files of
earlier jobs may lie there: they have another job's name, or their owner is dead, or nobody answers
with that secret. Whatever is not the store of this job is tried again until the deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import stat
import time
from pathlib import Path
from typing import Any

from hororing.rendezvous import protocol
from hororing.rendezvous.client import Deadline, Member, RendezvousError
from hororing.rendezvous.interfaces import addresses, reached_at
from hororing.rendezvous.protocol import ProtocolError
from hororing.rendezvous.store import Store

_LOOK_S = 0.05  # a shared file system tells nobody about new files
_TRY_S = 2.0  # one try with what the file says, before it is read again
_MOST_BYTES = 2**16


def place(directory: str, job: str) -> Path:
    """Where the file of a job is."""
    return Path(directory) / f"hororing-{job}.json"


def serve(directory: str, *, job: str, size: int, timeout_s: float) -> Member:
    """Start the store in this process, rank 0, write where it is, and connect.

    Raises
    ------
    OSError : the directory cannot be written.
    RendezvousError : a job of that name is running.
    """
    path = place(directory, job)
    found, _ = _read(path)
    if found is not None and _is_alive(found["owner"]):
        raise RendezvousError(
            f"{path} is of a job that runs (pid {found['owner'].get('pid')}): give each start of "
            "a job another HORORING_JOB"
        )
    secret = protocol.new_secret()
    store = Store(job=job, size=size, secret=secret, host="")
    store.start_thread()
    text = {
        "job": job,
        "address": ",".join(protocol.show_address(each, store.port) for each in addresses()),
        "secret": secret.hex(),
        "owner": _owner(os.getpid()),
    }
    try:
        _write(path, json.dumps(text))
        member = Member(
            f"127.0.0.1:{store.port}", secret=secret, job=job, rank=0, size=size,
            timeout_s=timeout_s,
        )  # fmt: skip
    except BaseException:
        store.stop()
        raise

    def remove() -> None:
        with contextlib.suppress(OSError):
            path.unlink()

    member.at_close += [remove, store.stop]
    member.local_address = reached_at()  # by other hosts
    return member


def join(directory: str, *, job: str, rank: int, size: int, timeout_s: float) -> Member:
    """Wait for the file, and connect. RendezvousError where that fails until the deadline."""
    deadline = Deadline(timeout_s)
    path = place(directory, job)
    while True:
        found, reason = _read(path)
        if found is not None:
            try:
                return Member(
                    found["address"], secret=bytes.fromhex(found["secret"]), job=job, rank=rank,
                    size=size, timeout_s=min(_TRY_S, deadline.left_s()),
                )  # fmt: skip
            except RendezvousError as error:
                if error.refused:
                    raise
                reason = str(error)
            except ValueError as error:  # an address that is none
                reason = f"{path}: {error}"
        if deadline.left_s() == 0:
            raise RendezvousError(
                f"rank {rank} on host {socket.gethostname()} found no store of its job within "
                f"{timeout_s:g} s; {reason}"
            )
        time.sleep(min(_LOOK_S, deadline.left_s()))


def _read(path: Path) -> tuple[dict[str, Any] | None, str]:
    """What the file says; None and why not, where there is none of a live job."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return None, f"{path}: {error.strerror}"
    with os.fdopen(number, "rb") as file:
        about = os.fstat(number)
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
            return None, f"{path} is not this user's alone"
        text = file.read(_MOST_BYTES)
    try:
        found = protocol.decode(text)
        for name in ("job", "address", "secret"):
            protocol.take(found, name, str)
        bytes.fromhex(found["secret"])
        owner = protocol.take(found, "owner", dict)
    except (ProtocolError, ValueError):
        return None, f"{path} is not understood"
    if _is_alive(owner) is False:
        return None, f"{path} is of a job that has ended"
    return found, ""


def _write(path: Path, text: str) -> None:
    """Make the file appear complete, readable by this user only."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    number = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(number, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(number)
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def _owner(pid: int) -> dict[str, Any]:
    """What tells a process from all others: of this machine, since it was started."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return {
        "pid": pid,
        "began": _began(pid),
        "space": f"{boot} {os.readlink('/proc/self/ns/pid')}",
    }


def _began(pid: int) -> int | None:
    """When the process began, in the kernel's ticks; None: there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _is_alive(owner: dict[str, Any]) -> bool | None:
    """None: it is of another host or container, where this cannot be known."""
    pid = owner.get("pid")
    if type(pid) is not int:
        return None
    now = _owner(pid)
    if owner.get("space") != now["space"]:
        return None
    return now["began"] is not None and owner.get("began") == now["began"]
