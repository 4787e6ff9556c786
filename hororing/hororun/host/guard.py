"""Ends what ranks leave behind, also when the process that started them has been killed.

A rank dies with its launcher by itself (`exec_rank`); the guard is for processes that ranks have
started, for which the kernel does not do that. It kills their process groups. A process that has
left its group (setsid, a daemon) is found by the variables of its rank, which it has inherited: it
gets SIGTERM, and SIGKILL a second later.

Reads a line for each rank until its standard input ends: its process group, and the variables that
only this rank has, as NAME=VALUE. -N: rank N has ended, and its group has been ended. A separate
script, without site-packages.
"""

import contextlib
import os
import signal
import sys
import time

_PATIENCE_S = 1.0
_POLL_S = 0.02

Marks = set[frozenset[bytes]]


def main() -> None:
    """Return when all processes have been ended."""
    ranks: dict[int, frozenset[bytes]] = {}
    for line in sys.stdin.buffer:
        number, *mark = line.split()
        if int(number) > 0:
            ranks[int(number)] = frozenset(mark)
        else:
            _end({ranks.pop(-int(number))})
    for group in ranks:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    _end(set(ranks.values()))


def _end(marks: Marks) -> None:
    """End the processes that have all variables of a mark."""
    marks.discard(frozenset())
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + _PATIENCE_S
        told: set[int] = set()
        while marks and time.monotonic() < until:
            found = [pid for pid in os.listdir("/proc") if pid.isdecimal()]
            alive = {int(pid) for pid in found if _signal(int(pid), marks, number, told)}
            if not alive:
                return
            told |= alive
            time.sleep(_POLL_S)


def _signal(pid: int, marks: Marks, number: int, told: set[int]) -> bool:
    """Signal a process unless that was done before. False: it has none of the marks."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        pidfd = os.pidfd_open(pid)  # so that no later process of this number is meant
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                variables = set(file.read().split(b"\0"))
            if any(mark <= variables for mark in marks):
                if pid not in told:
                    signal.pidfd_send_signal(pidfd, number)
                return True
        finally:
            os.close(pidfd)
    return False


if __name__ == "__main__":
    main()
