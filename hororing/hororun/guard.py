"""Ends process groups when the process that has started them is gone.

A rank dies with its launcher by itself (`exec_rank`); this is for what a rank has started, of which
the kernel takes no such care. Reads numbers of groups, a line each, until its standard input ends;
-N: the group N has been ended.
A script of its own, without site-packages.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Returns when all groups have been ended."""
    groups: set[int] = set()
    for line in sys.stdin:
        number = int(line)
        groups = groups | {number} if number > 0 else groups - {-number}
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
