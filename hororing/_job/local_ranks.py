"""Which ranks of this host have ended while MPI starts.

MPI_Init waits for every rank that the launcher has started. If one has died, it waits forever: a
launcher with fault tolerance (`mpirun --with-ft ulfm`) does not stop the others. So `init` checks
the processes of its job itself. It finds them by the variables that Open MPI sets, so they need not
cooperate: this also finds a rank that is still importing its framework.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from hororing._job.rendezvous.files import began

_JOB, _RANK = b"PMIX_NAMESPACE", b"PMIX_RANK"


def _variables(pid: int | str) -> tuple[bytes, int] | None:
    """The job and the rank in the environment of a process, as set by its launcher."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = (entry.partition(b"=") for entry in file.read().split(b"\0"))
            found = {name: value for name, _, value in pairs if name in (_JOB, _RANK)}
    except OSError:  # it has ended, or is another user's
        return None
    if len(found) < 2 or not found[_RANK].isdigit():
        return None
    return found[_JOB], int(found[_RANK])


def job_of(pid: int | str) -> str | None:
    """The id of the job that a process belongs to, if its launcher has set one."""
    found = _variables(pid)
    return found[0].decode("utf-8", "replace") if found else None


class Neighbours:
    """The ranks of this job that have been seen on this host."""

    def __init__(self, members: Collection[int] | None) -> None:
        """Watch the ranks `members`, or all of them if it is None."""
        own = _variables("self")
        self._job = own[0] if own else None
        self._members = members
        self._seen: dict[int, set[int]] = {}

    def ended(self) -> dict[int, int]:
        """The ranks that an earlier call has seen and that have ended: process id by rank.

        A rank whose children are alive counts as alive.
        """
        if self._job is None:
            return {}
        now: dict[int, set[int]] = {}
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            found = _variables(pid)
            if found is not None and found[0] == self._job:
                now.setdefault(found[1], set()).add(int(pid))
        for rank, pids in now.items():
            self._seen.setdefault(rank, set()).update(pids)
        # A process may overwrite its environment from its title on, so look for the title as well.
        return {
            rank: min(pids)
            for rank, pids in sorted(self._seen.items())
            if rank not in now
            and all(began(pid) is None for pid in pids)
            and (self._members is None or rank in self._members)
        }
