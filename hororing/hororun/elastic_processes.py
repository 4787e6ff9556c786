"""The launcher's records of an elastic job's processes and hosts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hororing.hororun.job import describe
from hororing.hororun.local import Program
from hororing.hororun.slots import Slot

_NAMED = 8  # of those that have failed


class ProcessHost(Protocol):
    """Starts and ends processes on a host: see `hosts`."""

    ready: bool  # `start` may be called
    hostname: str  # as its processes call it

    def start(self, programs: Sequence[Program]) -> None:
        """Start some. CannotStartError."""

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one process, or to all."""

    def reap(self, rank: int) -> None:
        """Remove a process that has ended."""

    def close(self) -> None:
        """Leave nothing behind."""


@dataclass(eq=False)
class ElasticHost:
    """A host, and whether it is to be used."""

    of: ProcessHost
    ready_by: float  # the agent must have answered
    leaves: bool = False  # it was removed


@dataclass(eq=False)
class ElasticProcess:
    """A process and its state."""

    number: int
    slot: Slot
    host: ElasticHost
    began: float
    uid: str = ""  # of its membership, once it has joined
    rank: int | None = None  # in the last generation in which it was
    generation: int = 0
    status: int | None = None  # reported at its end
    code: int | None = None  # its exit code, or minus the signal
    leaves: bool = False  # as the job wants it: no failure
    end: str = ""  # how it has ended, if the code does not show it
    lost_at: float | None = None  # when the store lost it
    gone: list[threading.Event] = field(default_factory=list)  # to be set at its end

    def name(self, with_host: bool) -> str:
        """Return its name for messages; with its host, if there are several."""
        where = f"process {self.number}" + (f" on host {self.slot.host}" if with_host else "")
        if self.rank is None:
            return where
        return f"rank {self.rank} of generation {self.generation} ({where})"

    def is_member(self) -> bool:
        """Whether it is a member: the store has not reported that it left."""
        return bool(self.uid) and self.status is None and self.lost_at is None

    def how(self) -> str:
        """Describe how it has ended."""
        if self.end:
            return self.end
        if self.code == 0:
            return "has ended without finishing"
        assert self.code is not None
        return describe(self.code)


def failures(failed: Sequence[ElasticProcess], started: int, generations: int, host: bool) -> str:
    """Describe how many have failed; with hosts, if there are several."""
    names = ", ".join(each.name(host) for each in failed[:_NAMED])
    more = f" and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
    return (
        f"{len(failed)} of {started} processes have failed ({names}{more}); there were "
        f"{generations} generations"
    )


def pause(slot: Slot, rest_s: float) -> str:
    """Return a text: what happens to the slot of a process that has failed."""
    if slot.retired:
        return "; its slot is no longer used"
    return f"; its slot pauses for {rest_s:.1f} s" if rest_s > 0 else ""


def blamed(failed: Sequence[ElasticProcess], first: int) -> ElasticProcess | None:
    """Return the process that best explains the failure of a job, `first` or a later one."""
    recent = failed[first:] or failed[-1:]
    # One that was killed: it may have caused the others' ends.
    return next((each for each in recent if (each.code or 0) < 0), next(iter(recent), None))


def no_state(failed: Sequence[ElasticProcess]) -> str:
    """Return a text: no process is left; with a hint if all ended with the first one."""
    text = "no process is left that has the state of the training"
    codes = [each.code or 0 for each in failed]
    if codes and codes[0] < 0 < max(codes):
        text += (
            "; the others have ended after the first one: a script goes on in a function of "
            "hvd.elastic.run (docs/elastic.md)"
        )
    return text
