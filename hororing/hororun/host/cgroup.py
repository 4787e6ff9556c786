"""What the control groups of this process allow, as in a container: cores and processes.

Version 2 has one hierarchy (cpu.max, pids.max), version 1 one for each controller. A group has at
most what each group above it has.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def cores() -> int:
    """Return how many cores this process may use: those of its affinity, at most its quota."""
    limits = [float(len(os.sched_getaffinity(0)))]
    for group in _groups("cpu"):
        for words in (_words(group / "cpu.max"), _words(group / "cpu.cfs_quota_us")):
            period = words[1] if len(words) > 1 else _first(group / "cpu.cfs_period_us")
            if words and words[0].isdecimal() and period.isdecimal() and int(period) > 0:
                limits.append(int(words[0]) / int(period))  # else: "max", or -1
    return max(math.ceil(min(limits)), 1)


def processes_left() -> int | None:
    """Return how many more processes and threads may be started, or None without a limit."""
    lefts = []
    for group in _groups("pids"):
        most, now = _first(group / "pids.max"), _first(group / "pids.current")
        if most.isdecimal() and now.isdecimal():
            lefts.append(max(int(most) - int(now), 0))
    return min(lefts, default=None)


def _groups(controller: str) -> Iterator[Path]:
    """The groups of this process and those above, as far as they can be seen here."""
    try:
        lines = _OWN.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for number, names, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if number != "0" and controller not in names.split(","):
            continue
        top = ROOT / names if number != "0" else ROOT
        # In a container the path may be that of the host, of which only the root is mounted.
        own = top / path.lstrip("/")
        yield own
        for each in own.parents:
            if each == top.parent:
                break
            yield each


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return []


def _first(file: Path) -> str:
    return next(iter(_words(file)), "")
