"""The members of an elastic job, and when its next generation forms: a state machine without IO.

A generation is a set of members with ranks 0 to n-1. Members join (`join`), report that they have
left their generation and want the next one (`ready`), end normally (`done`) or are lost (`lost`).
As soon as every live member is ready, and there are enough of them, a `World` forms. Only the first
generation waits for processes that may join later.

    join -> waiting -> World -> member -> ready -> waiting -> World ...

`admission` says which processes cannot take part: those are refused, or left out until `heal`.

See docs/adr/0051-generations-of-engines.md.

Invariants
  1. Generations have ascending numbers, from 1; each has one World.
  2. A World contains only members that have reported, since the previous World, that they left it.
  3. A World has a member of an earlier one, unless it is the first.
  4. Rank 0 has the most advanced state: most steps first, then most marks since the last one, then
     the oldest. Ranks of a host are consecutive.

Every method returns the events that it causes, in order. Pure: no clock, sockets or threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hororing._job.rendezvous.admission import NOTHING, Findings, differences, left_out

REMOVED, ADDED = 1, 2  # of hosts; as Horovod's HostUpdateResult

# The job ends when this many generations in a row, of the same members, could not start.
_TRIES = 3


@dataclass(frozen=True)
class Member:
    """A process in a generation; its place is its rank."""

    uid: str
    host: str
    pid: int
    step: int  # steps it had taken when the generation formed
    marks: int  # how often it has saved the script's other values since


@dataclass(frozen=True)
class Event:
    """An event."""


@dataclass(frozen=True)
class Joined(Event):
    """A process has joined; it is in no generation yet."""

    uid: str
    host: str
    pid: int


@dataclass(frozen=True)
class Lost(Event):
    """A process closed its connection unexpectedly, was declared dead, or was refused.

    `rank`: -1 if it has none. `refused`: it differs from the others, and may still be running.
    """

    uid: str
    host: str
    pid: int
    rank: int
    why: str
    refused: bool = False


@dataclass(frozen=True)
class Apart(Event):
    """Two hosts do not reach one another. `places`: their names, or the uids of two processes."""

    places: frozenset[str]
    why: str


@dataclass(frozen=True)
class Done(Event):
    """A process has ended normally. `rank`: -1 if it had none."""

    uid: str
    rank: int
    status: int


@dataclass(frozen=True)
class World(Event):
    """A generation has formed; members by rank.

    `why`: what a member has said about the end of the one before it; "": nothing. `lost`:
    how many steps its state has gone back by; -1: unknown. Only the job's launcher knows both.
    """

    generation: int
    members: tuple[Member, ...]
    why: str = ""
    lost: int = -1

    @property
    def step(self) -> int:
        """The number of steps before it; later ones are steps of its members."""
        return self.members[0].step


@dataclass(frozen=True)
class Broken(Event):
    """The generation cannot continue: its members must leave it. `rank` is to blame."""

    generation: int
    rank: int
    why: str


@dataclass(frozen=True)
class Updated(Event):
    """Members should leave together when convenient. `what`: REMOVED, ADDED, or both."""

    generation: int
    what: int


@dataclass(frozen=True)
class Retired(Event):
    """The host of a waiting process was removed: the process must end."""

    uid: str


@dataclass(frozen=True)
class Ended(Event):
    """The job cannot continue; no process gets into another generation."""

    reason: str


@dataclass(eq=False)
class _Process:
    uid: str
    host: str
    pid: int
    order: int  # order of arrival
    ready: bool = False
    step: int = 0
    marks: int = 0
    rank: int = -1  # in the last generation; -1: it was not in it
    newcomer: bool = True  # it has not been in any generation
    proven: bool = False  # it has been in one that has begun
    settings: str = ""
    lost: int = -1  # see `Findings`
    retired: bool = False  # was sent the request to end

    def advance(self) -> tuple[int, int, int]:
        return -self.step, -self.marks, self.order


@dataclass(eq=False)
class Generations:
    """The members of one job, and the generations that they form.

    Parameters
    ----------
    np : the number of members that the first generation waits for.
    min_np, max_np : the minimum and maximum number of members of a generation.
    """

    np: int
    min_np: int
    max_np: int
    number: int = 0  # of the last generation
    world: World | None = None  # the last generation
    broken: bool = False  # it is over, though some members may not have noticed
    ended: str = ""  # why there will be no other generation
    _finished: bool = False  # a member has finished: the others may end in any number
    _ending: set[str] = field(default_factory=set)  # whose end will show whether they have finished
    _expected: int | None = None
    _joined: int = 0
    _settings: str | None = None  # of the members of `world`; None: they differ
    _apart: set[frozenset[str]] = field(default_factory=set)  # of `Apart`
    _left: str = ""  # the first member that has left the last generation after a failure
    _failed: str = ""  # why the last generation could not start
    _failures: int = 0  # generations in a row, of the same members, that could not start
    _processes: dict[str, _Process] = field(default_factory=dict)
    _retired: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if not 1 <= self.min_np <= self.np <= self.max_np:
            raise ValueError(
                f"min_np={self.min_np}, np={self.np}, max_np={self.max_np}: they must ascend from 1"
            )

    # -----------------------------------------------------------------------------------------
    # Events

    def join(self, uid: str, host: str, pid: int) -> list[Event]:
        """Add a process, which must call `ready` next. ValueError: the uid is in use."""
        if uid in self._processes:
            raise ValueError(f"the uid {uid} is in use")
        self._processes[uid] = _Process(uid, host, pid, self._joined)
        self._joined += 1
        if self._expected:
            self._expected -= 1
        return [Joined(uid, host, pid)]

    def ready(
        self, uid: str, generation: int, step: int, marks: int, failed: bool,
        found: Findings = NOTHING,
    ) -> list[Event]:  # fmt: skip
        """Note that it has left its generation and waits for the next one.

        Parameters
        ----------
        generation : the last one that it was in; 0: none. If it is older than the current one, it
            never entered the current one, which therefore cannot work.
        step, marks : the progress of its state.
        failed : it left because something failed, so the others cannot continue either.
        """
        process = self._processes[uid]
        events: list[Event] = []
        if process.rank >= 0 and not process.ready and generation == self.number:
            events += self._note(process, found)
        if process.rank >= 0 and not process.ready and (failed or generation != self.number):
            why = f": {found.why}" if found.why else ""
            self._left = self._left or f"{_name(process)} has left generation {self.number}{why}"
            events += self._break(process.rank, f"{_name(process)} has left")
        is_new = process.rank < 0 and not process.ready
        process.ready, process.step, process.marks = True, step, marks
        process.settings, process.lost = found.settings, found.lost
        events += self._form()
        if process.ready and is_new and self._has_room_for(process):
            events += self._update(ADDED)
        return events

    def _note(self, process: _Process, found: Findings) -> list[Event]:
        """Take over what a member has found out in the generation that it leaves."""
        assert self.world is not None
        process.proven |= found.began
        if not found.began:
            self._failed = self._failed or found.why or f"{_name(process)} has left"
        events: list[Event] = []
        ranks = range(len(self.world.members))
        for rank in found.unreachable:
            events += self._part(process, rank) if rank in ranks else []
        for rank, why in found.misfits.items():
            uid = self.world.members[rank].uid if rank in ranks else process.uid
            if uid in self._processes and uid != process.uid:
                events += self._refuse(self._processes[uid], why)
        return events

    def _part(self, process: _Process, rank: int) -> list[Event]:
        """Note that `process` does not reach a rank of its generation, unless that is lost."""
        assert self.world is not None
        other = self.world.members[rank]
        if other.uid not in self._processes:
            return []
        places = frozenset((process.host, other.host))
        if len(places) == 1:
            places = frozenset((process.uid, other.uid))
        why = f"{_name(process)} cannot reach rank {rank} (host {other.host}, pid {other.pid})"
        events = self._break(rank, why)
        if places not in self._apart:
            self._apart.add(places)
            events.append(Apart(places, f"{why}; one of the two hosts is left out for a while"))
        return events

    def _refuse(self, process: _Process, why: str) -> list[Event]:
        del self._processes[process.uid]
        return [Lost(process.uid, process.host, process.pid, process.rank, why, refused=True)]

    def lost(self, uid: str, why: str) -> list[Event]:
        """Remove a process that closed its connection unexpectedly, or counts as dead."""
        process = self._processes.pop(uid)
        events: list[Event] = [Lost(uid, process.host, process.pid, process.rank, why)]
        # That explains why others could not reach it.
        here = (
            {uid} if any(each.host == process.host for each in self._all()) else {uid, process.host}
        )
        self._apart = {pair for pair in self._apart if pair.isdisjoint(here)}
        if process.rank >= 0 and not process.ready:
            events += self._break(process.rank, f"{_name(process)} is lost: {why}")
        return events + self._form()

    def done(self, uid: str, status: int, sure: bool = True) -> list[Event]:
        """Remove a process that has reported its end. Unless `sure`, `note_end` follows."""
        process = self._processes.pop(uid)
        if status == 0 and not process.newcomer and not self._is_retired(process):
            self._ending.add(uid)
        events: list[Event] = [Done(uid, process.rank, status)]
        return events + (self.note_end(uid, status) if sure else self._form())

    def note_end(self, uid: str, code: int) -> list[Event]:
        """The process of a `done` has ended with this exit code."""
        self._finished |= uid in self._ending and code == 0
        self._ending.discard(uid)
        return self._form()

    def expect(self, count: int) -> list[Event]:
        """Set the number of started processes that have not joined.

        If there are none, the first generation does not wait for `np`, only for `min_np`.
        """
        self._expected = count
        return self._form()

    def hosts_updated(self, added: Iterable[str], removed: Iterable[str]) -> list[Event]:
        """Inform members of added and removed hosts. A host that returns is not retired."""
        new, gone = set(added), set(removed)
        self._retired -= new
        return self._update((ADDED if new else 0) | (REMOVED if gone else 0))

    def retire(self, host_or_uid: str) -> list[Event]:
        """Exclude these processes from further generations: their next request ends them."""
        self._retired.add(host_or_uid)
        return self._form()

    def heal(self, places: frozenset[str]) -> list[Event]:
        """Try again whether these hosts, of an `Apart`, reach one another."""
        self._apart.discard(places)
        self._failures = 0
        events = self._form()
        waiting = [each for each in self._all() if each.ready and self._has_room_for(each)]
        return events + (self._update(ADDED) if waiting else [])

    # -----------------------------------------------------------------------------------------
    # Time

    def lacks(self) -> str:
        """Describe the wait of the next generation, which must not last forever, or return ""."""
        members = [each for each in self._all() if each.rank >= 0]
        over = self.broken or not members or any(each.ready for each in members)
        if self.ended or not (over if self.number else self._processes):
            return ""
        here = [
            each
            for each in self._all()
            if self._is_wanted(each) and (each.ready or each.rank >= 0 or not self.number)
        ]
        out = self._left_out(here)
        here = [each for each in here if each.uid not in out]
        if len(here) < self._min_members():
            wanted = f"{len(here)} of at least {self._min_members()} processes"
            if out:
                wanted += ", because there are hosts that do not reach one another"
            return "" if self._finished else wanted
        if not self._have_state(here):
            return "no process that has the state of the training"
        late = self._late()
        return f"{_name(late[0])} is not ready" if late else ""

    def give_up(self) -> list[Event]:
        """The wait that `lacks` describes has lasted too long."""
        self._expected = 0  # the first generation may be smaller
        events = self._form()
        if self.lacks():
            for each in self._late():
                events += self.lost(each.uid, "it has not requested a new generation in time")
        if lacking := self.lacks():
            events.append(self._end(f"cannot continue with {lacking}"))
        return events

    # -----------------------------------------------------------------------------------------

    def rank(self, uid: str) -> int:
        """Return its rank in the current generation; -1: it is not, or no longer, in it."""
        process = self._processes.get(uid)
        return -1 if process is None or process.ready else process.rank

    def _all(self) -> Iterable[_Process]:
        return self._processes.values()

    def _min_members(self) -> int:
        if self._finished:
            return 1
        return self.min_np if self.number or self._expected == 0 else self.np

    def _is_retired(self, process: _Process) -> bool:
        return not self._retired.isdisjoint((process.host, process.uid))

    def _is_wanted(self, process: _Process) -> bool:
        return not self._is_retired(process) and not (self._finished and process.newcomer)

    def _has_room_for(self, process: _Process) -> bool:
        count = len(self.world.members) if self.world is not None else 0
        members = [each for each in self._all() if each.rank >= 0]
        return (
            process.uid in self._processes
            and count < self.max_np
            and self._is_wanted(process)
            and process.uid not in self._left_out([*members, process])
        )

    def _left_out(self, processes: Iterable[_Process]) -> set[str]:
        return left_out(processes, self._apart)

    def _refuse_others(self) -> list[Event]:
        """Refuse newcomers whose settings differ from those of the members."""
        events: list[Event] = []
        for each in list(self._all()):
            if each.ready and each.newcomer and self._settings not in (None, each.settings):
                why = differences(each.settings, self._settings or "")
                events += self._refuse(each, why)
        return events

    def _have_state(self, processes: Iterable[_Process]) -> bool:
        """Whether one of them has; newcomers alone would begin again."""
        return not self.number or not all(each.newcomer for each in processes)

    def _late(self) -> list[_Process]:
        """The members that must be ready: only the first generation waits for newcomers."""
        return [
            each for each in self._all() if not each.ready and (each.rank >= 0 or not self.number)
        ]

    def _break(self, rank: int, why: str) -> list[Event]:
        if self.broken:
            return []
        self.broken = True
        return [Broken(self.number, rank, why)]

    def _update(self, what: int) -> list[Event]:
        return [Updated(self.number, what)] if what and self.world is not None else []

    def _form(self) -> list[Event]:
        """Form the next generation, if that is possible now."""
        events = self._refuse_others()
        for each in self._all():
            if each.ready and not each.retired and not self._is_wanted(each):
                each.retired = True
                events.append(Retired(each.uid))
        waiting = [each for each in self._all() if each.ready and not each.retired]
        out = self._left_out(waiting)
        waiting = [each for each in waiting if each.uid not in out]
        if self.ended or self._late() or len(waiting) < max(self._min_members(), 1):
            return events
        if not self._have_state(waiting):
            return events
        chosen = sorted(waiting, key=_Process.advance)[: self.max_np]
        if self._keeps_failing(chosen):
            return [
                *events,
                self._end(
                    f"cannot continue: {_TRIES} generations of the same processes could not start; "
                    f"the last one: {self._failed}"
                ),
            ]
        hosts = list(dict.fromkeys(each.host for each in chosen))
        chosen.sort(key=lambda each: (hosts.index(each.host), each.advance()))
        losses = [each.lost for each in chosen if not each.newcomer] or [-1]
        lost = -1 if -1 in losses else max(losses)
        for each in self._all():
            each.rank = -1
        for rank, each in enumerate(chosen):
            each.rank, each.ready, each.newcomer = rank, False, False
        self.number += 1
        why, self._left = self._left, ""
        self.broken, self._failed = False, ""
        settings = {each.settings for each in chosen}
        self._settings = settings.pop() if len(settings) == 1 else None
        members = (Member(each.uid, each.host, each.pid, each.step, each.marks) for each in chosen)
        self.world = World(self.number, tuple(members), why, lost)
        return [*events, self.world]

    def _keeps_failing(self, chosen: Iterable[_Process]) -> bool:
        """Whether these processes have failed to start often enough."""
        before = {each.uid for each in self.world.members} if self.world is not None else set()
        same = bool(self._failed) and before == {each.uid for each in chosen}
        self._failures = self._failures + 1 if same else 0
        return self._failures >= _TRIES

    def _end(self, why: str) -> Ended:
        self.ended = f"the job {why}"
        return Ended(self.ended)


def _name(process: _Process) -> str:
    rank = f"rank {process.rank}" if process.rank >= 0 else "a process"
    return f"{rank} (host {process.host}, pid {process.pid})"
