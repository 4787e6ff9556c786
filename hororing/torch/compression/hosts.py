"""scope="hosts": the ranks that sum within a host, and those that compress between hosts.

The first rank on each host of a process set leads it: it compresses the host's sum with the other
leaders, keeps the errors, and gives the result to its host. One leader per host sends no more
between hosts than several would, and keeps one error per host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hororing._engine import state
from hororing._requests.process_sets import ProcessSet, SetOfMembers, of_members

_POLL_S: Final = 1.0


class Hosts:
    """The hosts of some ranks, which include this one."""

    def __init__(self, ranks: Sequence[int]) -> None:
        names, rank = state.host_names(), state.rank()
        by_host: dict[str, list[int]] = {}
        for each in ranks:
            by_host.setdefault(names[each], []).append(each)
        inside = by_host[names[rank]]
        self.leader = inside[0]
        self.leads = self.leader == rank
        leaders = [members[0] for members in by_host.values()]
        # Both are requested before either is waited for. None: there are no other ranks.
        self._inside = of_members(inside) if len(inside) > 1 else None
        self._leaders = of_members(leaders) if self.leads and len(leaders) > 1 else None
        self.several = len(leaders) > 1

    def inside(self) -> ProcessSet | None:
        """Return the ranks of this host, None if alone. Block until all of these call it."""
        return _wait_for(self._inside)

    def leaders(self) -> ProcessSet | None:
        """Like `inside`, for the leaders of all hosts. None on one host and for other ranks."""
        return _wait_for(self._leaders)


def _wait_for(members: SetOfMembers | None) -> ProcessSet | None:
    while members is not None:
        found = members.get(_POLL_S)
        if found is not None:
            return found
    return None
