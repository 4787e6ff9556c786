"""The launcher's records of an elastic job's processes, and what follows from them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hororing._job.rendezvous import protocol
from hororing._job.rendezvous.elastic_store import World
from hororing.hororun.job.ending import KILLED_S, describe
from hororing.hororun.job.job import JobHost
from hororing.hororun.job.slots import Slot

_NAMED = 8  # of those that have failed


@dataclass(eq=False)
class ElasticProcess:
    """A process and its state."""

    number: int
    slot: Slot
    host: JobHost
    began: float
    uid: str = ""  # of its membership, once it has joined
    rank: int | None = None  # in the last generation in which it was
    generation: int = 0
    status: int | None = None  # reported at its end
    code: int | None = None  # its exit code, or minus the signal
    leaves: bool = False  # as the job wants it: no failure
    end: str = ""  # how it has ended, if the code does not show it
    then: str = ""  # what happens to its slot
    lost_at: float | None = None  # when the store lost it; None again once it is killed
    left_at: float | None = None  # when it has left the store: its end should follow
    refused: bool = False  # it differs from the others
    gone: list[threading.Event] = field(default_factory=list)  # to be set at its end

    def name(self, with_host: bool) -> str:
        """Return its name for messages; with its host, if there are several."""
        where = f"process {self.number}" + (f" on host {self.slot.host}" if with_host else "")
        return where if self.rank is None else f"{where} (rank {self.rank})"

    def is_member(self) -> bool:
        """Whether it is a member: the store has not reported that it left."""
        return bool(self.uid) and self.status is None and self.lost_at is None

    def described(self, with_host: bool) -> str:
        """Return its name and how it has ended."""
        return f"{self.name(with_host)} {self.how()}{self.then}"

    def how(self) -> str:
        """Describe how it has ended."""
        if self.end:
            return self.end
        if self.code is None:
            return "has left" if self.status is None else "is about to end"
        if self.code == 0:
            return "has finished" if self.status == 0 else "has ended without finishing"
        return describe(self.code)


class Processes:
    """All processes of an elastic job, by number, and whether it can continue with them.

    Attributes
    ----------
    started : all of them, in the order of starts.
    failed : those that have failed, in the order of their ends.
    no_ranks : those that have ended with 0 before the first generation.
    generation : of the last `World`. 0: there was none.
    """

    def __init__(self) -> None:
        self.started: list[ElasticProcess] = []
        self.failed: list[ElasticProcess] = []
        self.no_ranks: list[ElasticProcess] = []
        self.generation = 0
        self._recent = 0  # the first of `failed` that no generation has followed

    def live(self) -> list[ElasticProcess]:
        """Return those that have not ended."""
        return [each for each in self.started if each.code is None]

    def left(self) -> list[float]:
        """Return when those have left the store whose ends have not been reported yet."""
        return [each.left_at for each in self.live() if each.left_at is not None]

    def frozen(self, grace_s: float) -> list[ElasticProcess]:
        """Return those that left the store long ago and whose host's agent does not answer.

        The agent's connection only shows that its host lives.
        """
        until = time.monotonic() - grace_s
        late = [each for each in self.live() if each.left_at is not None and each.left_at <= until]
        return [each for each in late if each.host.of.silent_s() >= KILLED_S]

    def used(self) -> int:
        """Return the number of slots that are not free."""
        return len(self.live()) + len(self.no_ranks)

    def of(self, uid: str) -> ElasticProcess | None:
        """Return the one that has joined as `uid`. None: the job has not started it."""
        number = protocol.process_of(uid)
        return self.started[number] if number < len(self.started) else None

    def form(self, world: World) -> dict[int, int]:
        """Take over the ranks of a generation; return them by process number."""
        self.generation = world.generation
        self._recent = len(self.failed)
        ranks = {protocol.process_of(each.uid): n for n, each in enumerate(world.members)}
        for process in self.started:
            if process.number in ranks:
                process.rank, process.generation = ranks[process.number], world.generation
        return ranks

    def start_text(self, process: ElasticProcess, with_host: bool) -> str:
        """Describe the start of a process after the first ones."""
        before = [each.number for each in self.started if each.slot is process.slot]
        place = f" in place of process {before[-1]}" if before else ""
        return f"{process.name(with_host)} starts{place}"

    def why_over(self, usable: int, with_host: bool) -> str:
        """Return why the job cannot continue. "": it can, with `usable` slots."""
        live = self.live()
        if self.generation and not any(each.generation for each in live):
            return no_state(self.failed[self._recent :])
        if self.generation or any(each.uid for each in live):
            if not self.no_ranks:
                return ""
            # The others would wait for it.
            name = self.no_ranks[0].name(with_host)
            return f"{name} has ended without calling init(), which another one has called"
        # If each slot has had a failure, a new start would fail again.
        failed = {each.slot for each in self.failed if (each.code or 0) > 0}
        if failed and len(failed) >= usable:
            return "every process has failed before the first generation"
        return ""

    def all_ended_before_init(self, usable: int) -> bool:
        """Whether all have ended with 0 without calling init(), one for each of `usable` slots."""
        return 0 < len(self.no_ranks) >= usable and not self.live()

    def blamed(self) -> ElasticProcess | None:
        """Return the process that best explains why the job has failed."""
        recent = self.failed[self._recent :] or self.failed[-1:]
        # One that was killed: it may have caused the others' ends.
        return next((each for each in recent if (each.code or 0) < 0), next(iter(recent), None))

    def failures(self, with_host: bool) -> str:
        """Describe how many have failed."""
        names = ", ".join(each.name(with_host) for each in self.failed[:_NAMED])
        more = f" and {len(self.failed) - _NAMED} more" if len(self.failed) > _NAMED else ""
        return (
            f"{len(self.failed)} of {len(self.started)} processes have failed ({names}{more}); "
            f"there were {self.generation} generations"
        )


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
