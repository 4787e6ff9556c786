"""Ends process groups when the process that started them has ended.

A rank dies with its launcher by itself (`exec_rank`); the guard is for processes that a rank has
started, for which the kernel does not do that. Reads numbers of groups, one per line, until its
standard input ends; -N: group N has been ended. A separate script, without site-packages.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Return when all groups have been ended."""
    groups: set[int] = set()
    for line in sys.stdin:
        number = int(line)
        groups = groups | {number} if number > 0 else groups - {-number}
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
