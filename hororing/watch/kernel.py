"""What the kernel says about a process and about this host. Times in ns since some beginning."""

from __future__ import annotations

import contextlib
import os
import re
from functools import cache
from pathlib import Path

_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")


def process(pid: int) -> dict[str, int | str]:
    """Figures of a process. OSError if it has ended.

    state : R running, S sleeping, D waiting for a disk, T stopped, Z ended.
    cpu_ns : of all its threads. main_cpu_ns, queued_ns : of its main thread, on a core, and ready
    to run while others had the core. disk_ns : waiting for disks, where the kernel counts that.
    """
    text = _read(f"/proc/{pid}/stat")
    fields = text[text.rindex(")") + 2 :].split()
    ran, queued, _ = (_read(f"/proc/{pid}/schedstat") or "0 0 0").split()
    return {
        "state": fields[0],
        "cpu_ns": (int(fields[11]) + int(fields[12])) * _TICK_NS,
        "disk_ns": int(fields[39]) * _TICK_NS,
        "main_cpu_ns": int(ran),
        "queued_ns": int(queued),
        "throttled_ns": _throttled(_cgroup(pid)),
    }


def host() -> dict[str, int | float]:
    """Figures of this host: cores, steal_ns (of all cores), pressure of cpu, io and memory.

    A pressure is the share of the last 10 s in which something waited, in 0 .. 1.
    """
    first = _read("/proc/stat").partition("\n")[0].split()
    found: dict[str, int | float] = {
        "cores": os.cpu_count() or 1,
        "steal_ns": int(first[8]) * _TICK_NS,
    }
    for what in ("cpu", "io", "memory"):
        with contextlib.suppress(OSError):  # a kernel without PSI
            some = re.search(r"some avg10=([\d.]+)", _read(f"/proc/pressure/{what}"))
            found[f"{what}_pressure"] = float(some[1]) / 100 if some else 0.0
    return found


def _throttled(folder: str | None) -> int:
    """How long quotas of its control group kept a process from running; 0: unknown."""
    if folder is None:
        return 0
    with contextlib.suppress(OSError):
        text = _read(f"{folder}/cpu.stat")
        if found := re.search(r"^throttled_usec (\d+)", text, re.M):
            return int(found[1]) * 1000
        if found := re.search(r"^throttled_time (\d+)", text, re.M):
            return int(found[1])
    return 0


@cache
def _cgroup(pid: int) -> str | None:
    """The folder of its control group for processors, if it has one below the root."""
    for line in _read(f"/proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if path == "/" or (controllers and "cpu" not in controllers.split(",")):
            continue
        for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", f"/sys/fs/cgroup/{controllers}"):
            if Path(root + path, "cpu.stat").exists():
                return root + path
    return None


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
