"""Replaces itself by a rank's program; the process dies with the one that started it.

A separate script: it runs without site-packages, because every rank waits for it.
"""

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127  # as shells do


def main(parent: int, files: int, command: list[str]) -> None:
    """Never returns. `files`: how many it may open; -1: as many as this process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has already died
        os._exit(128 + signal.SIGKILL)
    if files >= 0:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
    # Undo changes by Python that programs do not expect.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"hororun: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
