"""Becomes the program of a rank, in a process that dies with the one that has started it.

A script of its own: it runs without site-packages, since every rank waits for it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127  # as shells do


def main(parent: int, command: list[str]) -> None:
    """Never returns."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(128 + signal.SIGKILL)
    # Python has changed what programs expect to find.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"hororun: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
