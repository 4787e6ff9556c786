"""The limits of this process: enough file descriptors for a job, or an error that says how many.

Programs that hororun starts get the user's soft limit back, because some fail with high numbers
(select(2)).
"""

from __future__ import annotations

import errno
import os
import resource
import sys

_SPARE = 24  # for libraries, files of the script, and what a start needs for a moment
_FILES = resource.RLIMIT_NOFILE

_users: list[int] = []  # the soft limit before it was raised


class LimitError(OSError):
    """The job needs more than this process may have; the text says how much."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.EMFILE, text)

    def __str__(self) -> str:
        return str(self.strerror)


def raise_files() -> None:
    """Let this process open as many files as the hard limit allows."""
    soft, hard = resource.getrlimit(_FILES)
    if soft != hard:
        resource.setrlimit(_FILES, (hard, hard))
        if not _users:
            _users.append(soft)


def make_room(more: int, what: str) -> None:
    """Let this process open `more` files. LimitError, which begins with `what`, if it may not."""
    needed = more + _SPARE + _open_now()
    if needed > files():
        raise_files()
    if needed > files():
        raise LimitError(
            f"{what} need about {needed} file descriptors in this process, which may have "
            f"{files()}: raise the hard limit (ulimit -Hn), or use fewer"
        )


def files() -> int:
    """Return how many files this process may open."""
    soft, _ = resource.getrlimit(_FILES)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def users_files() -> int:
    """Return how many files programs may open that this process starts; -1: as many as it."""
    return _users[0] if _users else -1


def why_not_started(error: OSError, program: str) -> str:
    """Describe why a program could not be started; a limit is not the program's fault."""
    if isinstance(error, LimitError):
        return str(error)
    if error.errno == errno.EMFILE:
        return f"out of file descriptors, of which this process may have {files()} (ulimit -n)"
    if error.errno == errno.EAGAIN:
        return (
            "no more processes or threads may be started: ulimit -u, or pids.max of the container"
        )
    return f"{error.filename or program}: {error.strerror}"


def _open_now() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
