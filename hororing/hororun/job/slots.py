"""The slots in which an elastic job starts processes, and their delays after failures. Pure.

A slot is a place for one process on a host. After a failure it pauses, longer after each one. The
pause is per slot, not per host, because only one GPU may be broken. A slot is retired if its
processes keep failing by themselves before they take part in a generation.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from hororing.hororun.flags.host_lists import Host

# Without --blacklist-cooldown-range: no pause after the first failure, then 0.5, 1, 2, ... s.
_FIRST_S, _LONGEST_S = 0.5, 60.0
# A process that lived this long resets the count of failures.
_LONG_LIFE_S = 60.0
_EARLY_FAILURES = 3


@dataclass(eq=False)
class Slot:
    """A place for one process.

    Attributes
    ----------
    index : among the slots of the host.
    neighbours : the number of slots of the host when it was added.
    busy : a process is running in it.
    ready_at : do not use it before this monotonic time, in seconds.
    retired : do not use it again.
    """

    host: str
    index: int
    neighbours: int  # slots of the host
    busy: bool = False
    ready_at: float = 0.0
    retired: bool = False
    failures: int = 0  # in a row
    early: int = 0  # of these, before the process took part


@dataclass(eq=False)
class Slots:
    """All slots of a job.

    Parameters
    ----------
    max_np : the maximum number of processes at a time.
    cooldown : shortest and longest pause after a failure, in seconds; None: see above.
    """

    max_np: int
    cooldown: tuple[float, float] | None = None
    random: random.Random = field(default_factory=random.Random)
    # Also slots that their host has lost: a process may still be busy in one when it returns.
    _hosts: dict[str, list[Slot]] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def update(self, hosts: Iterable[Host]) -> tuple[list[str], list[str]]:
        """Use these hosts and slots from now on; return the added and the removed hosts.

        Slots that stay keep their history; those of a host that returns are new.
        """
        before, self._hosts, self._counts = self._hosts, {}, {}
        for host in hosts:
            slots, total = before.get(host.name, []), host.slots or 0
            new = range(len(slots), total)
            self._hosts[host.name] = [*slots, *(Slot(host.name, index, total) for index in new)]
            self._counts[host.name] = total
        came = [name for name in self._hosts if name not in before]
        return came, [name for name in before if name not in self._hosts]

    def of(self, host: str) -> list[Slot]:
        """Return the slots of a host; none if it is not part of the job."""
        return self._hosts.get(host, [])[: self._counts.get(host, 0)]

    def usable(self) -> int:
        """The number of possible processes, now or after a pause."""
        return min(sum(not slot.retired for slot in self._all()), self.max_np)

    def due(self, now: float, running: int) -> list[Slot]:
        """Return the slots in which to start a process now; `running` processes exist."""
        ready = [slot for slot in self._free() if slot.ready_at <= now]
        return ready[: max(self.max_np - running, 0)]

    def next_at(self, now: float, running: int) -> float | None:
        """Return the time when the next one is due, or None if none is due by time alone."""
        if running >= self.max_np:
            return None
        return min((slot.ready_at for slot in self._free() if slot.ready_at > now), default=None)

    def failed(self, slot: Slot, now: float, *, early: bool, lived_s: float = 0.0) -> float:
        """Delay its next start, and return the delay in seconds.

        `early`: the process failed by itself, before it took part in a generation.
        """
        slot.busy = False
        if lived_s >= _LONG_LIFE_S:
            slot.failures = 0
        slot.failures += 1
        slot.early = slot.early + 1 if early else 0
        slot.retired = slot.early >= _EARLY_FAILURES and self.cooldown is None
        rest_s = self._rest_s(slot.failures)
        slot.ready_at = now + rest_s
        return rest_s

    def _rest_s(self, failures: int) -> float:
        if self.cooldown is None:
            return min(_FIRST_S * 2.0 ** min(failures - 2, 30), _LONGEST_S) if failures > 1 else 0.0
        shortest, longest = self.cooldown
        random_s = self.random.random() * shortest  # so that they do not all start at once
        return min(shortest * 2.0 ** min(failures - 1, 30) + random_s, longest)

    def _all(self) -> list[Slot]:
        return [slot for host in self._hosts for slot in self.of(host)]

    def _free(self) -> list[Slot]:
        return [slot for slot in self._all() if not slot.busy and not slot.retired]


def pause(slot: Slot, rest_s: float) -> str:
    """Return a text: what happens to the slot of a process that has failed."""
    if slot.retired:
        return "; its slot is no longer used"
    return f"; its slot pauses for {rest_s:.1f} s" if rest_s > 0 else ""
