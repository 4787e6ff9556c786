"""The hosts that Slurm, PBS or LSF have given to a batch job, according to its variables."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hororing.hororun.flags.host_lists import Host, parse_hosts

_SCONTROL_S = 2.0  # it asks a server
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class Allocation:
    """Hosts with their slots, and the scheduler or file that named them."""

    scheduler: str
    hosts: list[Host]


def find(environ: Mapping[str, str]) -> Allocation | None:
    """Find an allocation. Return None if there is none.

    Raises
    ------
    ValueError : a variable is invalid, or its file cannot be read; the text names it.
    """
    if nodes := environ.get("SLURM_JOB_NODELIST"):
        return Allocation("Slurm", _slurm(nodes, environ.get("SLURM_TASKS_PER_NODE", "")))
    # One line or word for each slot.
    for scheduler, variable in (("PBS", "PBS_NODEFILE"), ("LSF", "LSB_DJOB_HOSTFILE")):
        if path := environ.get(variable):
            try:
                with open(path, encoding="utf-8") as file:
                    lines = file.read().split()
            except OSError as error:
                raise ValueError(
                    f"{variable}={path} cannot be read ({error.strerror}); unset it if this is "
                    f"no job of {scheduler}, or pass --hosts or --hostfile"
                ) from None
            return Allocation(scheduler, _counted(variable, lines))
    if names := environ.get("LSB_HOSTS"):
        return Allocation("LSF", _counted("LSB_HOSTS", names.split()))
    return None


def kill_wait_s(environ: Mapping[str, str]) -> float | None:
    """Return the time between SIGTERM and SIGKILL of the scheduler, or None if it is unknown."""
    if "SLURM_JOB_ID" not in environ:
        return None
    try:
        text = subprocess.run(
            ["scontrol", "show", "config"], capture_output=True, text=True, check=False,
            timeout=_SCONTROL_S,
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    found = re.search(r"^KillWait\s*=\s*(\d+) sec", text, re.MULTILINE)
    return None if found is None else float(found[1])


def _slurm(nodes: str, tasks: str) -> list[Host]:
    """``node[1-3],gpu7`` and ``4(x2),2,1``: the number of tasks of each, in this order."""
    try:
        hosts = parse_hosts(nodes)
    except ValueError as error:
        raise ValueError(f"SLURM_JOB_NODELIST: {error}") from None
    counts: list[int] = []
    for part in tasks.split(",") if tasks else []:
        found = _COUNT.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"SLURM_TASKS_PER_NODE={tasks}: expected numbers, as 4(x2),2")
        counts += [int(found[1])] * int(found[2] or 1)
    if not counts:
        return hosts
    if len(counts) != len(hosts):
        raise ValueError(
            f"SLURM_TASKS_PER_NODE={tasks} is for {len(counts)} nodes, and "
            f"SLURM_JOB_NODELIST={nodes} of {len(hosts)}"
        )
    return [Host(host.name, count) for host, count in zip(hosts, counts, strict=True)]


def _counted(variable: str, names: Iterable[str]) -> list[Host]:
    hosts = [Host(name, count) for name, count in Counter(names).items()]
    if not hosts:
        raise ValueError(f"{variable}: it names no host")
    return hosts
