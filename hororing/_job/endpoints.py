"""The rendezvous of ranks started by a launcher without MPI, from its variables.

======================  ========================================================================
torchrun, accelerate    torch's store at MASTER_ADDR:MASTER_PORT (rendezvous/torch_store.py)
srun                    a file in a folder of its user alone, named by the job and its step: in
                        /dev/shm on one node, in ~/.hororing on several
Kubernetes              rank 0's pod by its name in the job's headless service
======================  ========================================================================

Pure, except for this host's name and this process's user.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hororing._job import launchers
from hororing._job.launchers import Launch
from hororing._job.rendezvous import protocol

FILE, TORCH = "file://", "torch://"
KUBERNETES_PORT = 29411
_ALONE = "HORORING_ALONE=1 makes this process a job of one rank"
_ONE_NODE = "/dev/shm/hororing-"
_IN_HOME = ".hororing"


@dataclass(frozen=True)
class Place:
    """The rendezvous of the ranks."""

    rendezvous: str  # host:port, file:///directory, torch://host:port
    job: str
    one_host: bool = False  # all ranks are on this host
    makes_store: bool = False  # torch's store: rank 0 makes it, not an agent
    makes_directory: bool = False  # a folder of this user alone
    remedy: str = ""  # what to do if they do not meet there


def place(started_by: Launch, env: Mapping[str, str]) -> Place | None:
    """Return the place from the launcher's variables, or None if they name none.

    ValueError names the variable that is missing or wrong.
    """
    return _PLACES[started_by.launcher](started_by, env) if applies_to(started_by) else None


def applies_to(started_by: Launch) -> bool:
    """Whether `place` supports this launcher, and there are other ranks."""
    return started_by.launched and started_by.launcher in _PLACES


def job(started_by: Launch, env: Mapping[str, str]) -> str:
    """Return a name that is unique among all starts on all hosts of a shared directory, or ""."""
    number = env.get("SLURM_JOB_ID")
    if started_by.launcher != launchers.SRUN or not number:
        return ""
    # Several clusters may share directories.
    return _name("slurm", env.get("SLURM_CLUSTER_NAME"), number, env.get("SLURM_STEP_ID"))


def _torch(started_by: Launch, env: Mapping[str, str]) -> Place:
    given = {name: env.get(name, "").strip() for name in ("MASTER_ADDR", "MASTER_PORT")}
    for name, text in given.items():
        if not text:
            raise ValueError(
                f"init: {started_by.sign} shows that there are other ranks, but {name} is not set: "
                f"start with torchrun or hororun, or set HORORING_RENDEZVOUS; {_ALONE}"
            )
    port = given["MASTER_PORT"]
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
        raise ValueError(f"init: MASTER_PORT={port!r} is not a port")
    host = given["MASTER_ADDR"].removeprefix("[").removesuffix("]")
    one_host = started_by.local_size == started_by.size
    return Place(
        f"{TORCH}[{host}]:{port}" if ":" in host else f"{TORCH}{host}:{port}",
        _name("torchrun", env.get("TORCHELASTIC_RUN_ID"), env.get("TORCHELASTIC_RESTART_COUNT")),
        one_host=one_host,
        makes_store=env.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        remedy="" if one_host else if_loopback("MASTER_ADDR", [host]),
    )


def if_loopback(variable: str, hosts: list[str]) -> str:
    """Return what may be wrong if all `hosts`, at which ranks meet, are loopback addresses."""
    if not all(map(protocol.is_loopback, hosts)):
        return ""
    return (
        f"{hosts[0]} is this host, and no other one reaches it: if there are ranks on other hosts, "
        f"set {variable} to an address of rank 0's host"
    )


def _slurm(started_by: Launch, env: Mapping[str, str]) -> Place:
    name = job(started_by, env)
    if not name:
        raise ValueError(
            f"init: {started_by.sign} shows that there are other ranks, but SLURM_JOB_ID is not "
            f"set; {_ALONE}"
        )
    if env.get("SLURM_STEP_NUM_NODES") == "1":
        directory = f"{FILE}{_ONE_NODE}{os.geteuid()}"
        return Place(directory, name, one_host=True, makes_directory=True)
    remedy = (
        "set HORORING_RENDEZVOUS=file:///directory to one that all nodes share and you can write"
    )
    home = env.get("HOME", "")
    if not home.startswith("/"):
        raise ValueError(f"init: HOME is not set, where the ranks of several nodes meet: {remedy}")
    directory = f"{FILE}{home.rstrip('/')}/{_IN_HOME}"
    return Place(directory, name, makes_directory=True, remedy=remedy)


def _kubernetes(started_by: Launch, env: Mapping[str, str]) -> Place:
    if started_by.size is None:
        raise ValueError(
            f"init: {started_by.sign} is this pod's index, but the number of pods is unknown: set "
            f"HORORING_SIZE to the job's completions; {_ALONE}"
        )
    pod, _, domain = socket.getfqdn().partition(".")
    name, _, number = pod.rpartition("-")
    if not name or not domain or number != str(started_by.rank):
        raise ValueError(
            f"init: {started_by.own} is set, but this pod's name, {socket.getfqdn()!r}, does not "
            "contain that of pod 0: give the pods the subdomain of a headless service, or set "
            f"HORORING_RENDEZVOUS=host:{KUBERNETES_PORT} to the host of pod 0"
        )
    return Place(f"{name}-0.{domain}:{KUBERNETES_PORT}", _name(name))


def _name(*parts: str | None) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", ".".join(part for part in parts if part))[:100]


_PLACES: dict[str, Callable[[Launch, Mapping[str, str]], Place]] = {
    launchers.TORCHRUN: _torch,
    launchers.SRUN: _slurm,
    launchers.KUBERNETES: _kubernetes,
}
