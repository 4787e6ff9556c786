"""Rank 0's thread that hands out trials, and what it knows of the process sets.

The ranks are connected to it by a socket in a folder that only their user can open. They could not
use collectives for that: a rank that waits for a trial to end would count as stalled.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from hororing.toolkit.search.plans import Assignment, Plan, is_finite
from hororing.toolkit.search.trial import Outcome
from hororing.toolkit.search.worker import Message

TICK_S = 0.5
PING_S = 5.0
# How long ranks may take to end a trial that was given up.
GRACE_S = 10.0

Recorder = Callable[[Assignment, Outcome], None]


@dataclass
class _Set:
    """A process set, and its trial."""

    ranks: list[int]
    trial: Assignment | None = None
    begun: float = 0.0
    heard: dict[int, float] = field(default_factory=dict)  # by rank: when it last said something
    done: dict[int, Message] = field(default_factory=dict)  # by rank
    why: str = ""  # the trial was given up
    given_up: float = 0.0  # when
    lost: bool = False  # ranks did not end it in time
    told: bool = False  # the plan knows the end of the trial
    replaced: bool = False  # since the last trial


class Hub:
    """Hands out trials until the plan has no more.

    Parameters
    ----------
    connections : list of Connection
        To all ranks, by rank.
    sets : list
        The ranks of each process set.
    replaceable : bool
        Whether the process sets can be removed: the global one cannot.
    timeout_s : float
        A trial is given up if none of its ranks' calls of `report` or its end came for so long.
    record : callable
        Called for each outcome.
    """

    def __init__(
        self,
        plan: Plan,
        connections: list[Connection],
        sets: list[list[int]],
        replaceable: bool,
        timeout_s: float,
        record: Recorder,
    ) -> None:
        self._plan, self._connections = plan, connections
        self._sets = [_Set(ranks) for ranks in sets]
        self._of_rank = {rank: each for each in self._sets for rank in each.ranks}
        self._replaceable, self._timeout_s, self._record = replaceable, timeout_s, record
        self.outcomes: list[Outcome] = []
        self._unrecorded: list[tuple[Assignment, Outcome]] = []
        self._spans: dict[int, list[tuple[float, float]]] = {r: [] for r in self._of_rank}

    def run(self) -> None:
        """Run the search, and tell all ranks its result or what went wrong."""
        try:
            result: Message = self._search()
        except Exception as error:
            result = {"error": str(error) or type(error).__name__}
            for each in self._sets:
                if each.trial is not None:
                    waiting = [rank for rank in each.ranks if rank not in each.done]
                    with contextlib.suppress(OSError):  # one has left
                        self._send(waiting, {"kind": "give up", "number": each.trial.number})
        lost = [rank for each in self._sets if each.lost for rank in each.ranks]
        # Ranks that hang may not read: last.
        for rank in sorted(self._of_rank, key=lambda rank: (rank in lost, rank)):
            try:
                self._connections[rank].send({"kind": "end", "lost": lost, **result})
            except OSError:  # it has left
                continue
        if lost:
            self._wait_for_ends({rank for rank in self._of_rank if rank not in lost})

    def _wait_for_ends(self, well: set[int]) -> None:
        """Wait for the processes of these ranks: those that hang end with them, see the worker."""
        while well:
            ready = wait([self._connections[rank] for rank in well])
            for rank in [rank for rank in well if self._connections[rank] in ready]:
                try:
                    self._connections[rank].recv()
                except (EOFError, OSError):
                    well.discard(rank)
        for each in self._connections:
            each.close()

    def _search(self) -> Message:
        self._assign_all()
        ranks = {id(each): rank for rank, each in enumerate(self._connections)}
        pinged = time.monotonic()
        while any(each.trial is not None and not each.lost for each in self._sets):
            for ready in wait(self._connections, TICK_S):
                rank = ranks[id(ready)]
                try:
                    message = self._connections[rank].recv()
                except (EOFError, OSError):
                    message = {"kind": "left"}
                if message["kind"] == "left":
                    raise RuntimeError(f"rank {rank} has left the search")
                self._of_rank[rank].heard[rank] = time.monotonic()
                self._receive(rank, message)
            now = time.monotonic()
            self._check_time(now)
            if now > pinged + PING_S:
                pinged = now
                # One that hangs may not read, and the hub must not wait for it.
                well = [rank for rank, each in self._of_rank.items() if not each.lost]
                self._send(well, {"kind": "ping"})
        busy, gap_s = self._shares()
        best = self._plan.best(self.outcomes)
        return {"best": best, "outcomes": self.outcomes, "busy": busy, "gap_s": gap_s}

    def _send(self, ranks: Any, message: Message) -> None:
        for rank in ranks:
            self._connections[rank].send(message)

    def _assign_all(self) -> None:
        """Give each free set a trial, if there is one; then record what has ended.

        Each write may wait for rank 0's training to release the interpreter, for 5 ms.
        """
        try:
            self._assign_free()
        finally:
            for trial, outcome in self._unrecorded:
                self._record(trial, outcome)
            self._unrecorded.clear()

    def _assign_free(self) -> None:
        for number, each in enumerate(self._sets):
            if each.trial is not None:
                continue
            trial = self._plan.next(number)
            if trial is None:
                continue
            ordered = each.replaced
            if trial.state is not None and trial.state_at != number:
                order = {"kind": "copy", "source": trial.state_at, "target": number}
                self._send(self._of_rank, {**order, "key": trial.state})
                ordered = True
            now = time.monotonic()
            each.trial, each.begun = trial, now
            each.heard = dict.fromkeys(each.ranks, now)
            each.done, each.why, each.told, each.replaced = {}, "", False, False
            self._send(each.ranks, {
                "kind": "trial", "number": trial.number, "params": trial.params,
                "seed": trial.seed, "key": trial.key, "state": trial.state,
                "first_step": trial.first_step, "ordered": ordered,
            })  # fmt: skip

    def _receive(self, rank: int, message: Message) -> None:
        each = self._of_rank[rank]
        trial = each.trial
        if trial is None or message["number"] != trial.number:
            return
        if message["kind"] == "report":
            if rank == each.ranks[0]:
                self._answer(each, trial, message["step"], message["value"])
            return
        each.done[rank] = message
        self._spans[rank].append((message["begin"], message["end"]))
        if message["status"] == "failed" and not each.why:
            whose = "" if message["why"].startswith(_OF_ALL) else f"rank {rank}: "
            each.why = whose + message["why"]
            if not message["why"].startswith(_OF_ALL):
                self._give_up(each)
        if len(each.done) == len(each.ranks):
            self._end(each, trial)

    def _answer(self, each: _Set, trial: Assignment, step: int, value: float) -> None:
        decision = "diverged"
        if is_finite(value):
            trial.last, trial.steps = value, trial.steps + 1
            decision = self._plan.report(trial, step, value)
        trial.reports.append((step, value))
        answer = {"kind": "answer", "number": trial.number, "decision": decision, "value": value}
        self._send(each.ranks, answer)

    def _give_up(self, each: _Set) -> None:
        """End a trial on all ranks: interrupt them, and fail what is in flight among them."""
        assert each.trial is not None
        each.given_up = time.monotonic()
        waiting = [rank for rank in each.ranks if rank not in each.done]
        self._send(waiting, {"kind": "give up", "number": each.trial.number})
        if self._replaceable and len(each.ranks) > 1:
            number = self._sets.index(each)
            self._send(self._of_rank, {"kind": "replace", "set": number})
            each.replaced = True

    def _check_time(self, now: float) -> None:
        for each in self._sets:
            if each.trial is None or each.lost:
                continue
            silent = [r for r in each.ranks if r not in each.done]
            if each.given_up and now > each.given_up + GRACE_S:
                each.lost = True
                each.why += f"; ranks {silent} do not respond, and get no more trials"
                self._tell(each, each.trial, "failed", None)
                self._assign_all()  # a generation may have ended
            elif not each.given_up and any(now > each.heard[r] + self._timeout_s for r in silent):
                each.why = f"no report and no end for {self._timeout_s:g} s"
                self._give_up(each)

    def _end(self, each: _Set, trial: Assignment) -> None:
        """All ranks have ended the trial."""
        first = each.done[each.ranks[0]]
        status, value = first["status"], first["value"]
        interrupted = {r: m["why"] for r, m in each.done.items() if m["status"] == "given up"}
        if status == "completed" and value is None and not each.why:
            value = trial.last
            each.why = "" if value is not None else "train returned and reported nothing"
        if each.why or interrupted:
            status, value = "failed", None
            if not each.why.startswith("rank "):  # else these ranks waited for that one
                each.why += "".join(f"; rank {r} was {why}" for r, why in interrupted.items())
        if interrupted and not self._replaceable and len(each.ranks) > 1:
            raise RuntimeError(
                f"trial {trial.number} failed, {each.why}. Its ranks are all ranks of the job, and "
                "cannot go on without a process set of their own: choose a smaller ranks_per_trial"
            )
        self._tell(each, trial, status, value)
        each.trial, each.lost, each.given_up = None, False, 0.0
        self._assign_all()

    def _tell(self, each: _Set, trial: Assignment, status: str, value: float | None) -> None:
        if each.told:
            return
        each.told = True
        self._plan.tell(trial, status, value, self._sets.index(each))
        outcome = Outcome(
            trial.number, trial.params, status, trial.last if value is None else value, each.why,
            each.ranks, time.monotonic() - each.begun, trial.key and trial.key[0], trial.parent,
        )  # fmt: skip
        self.outcomes.append(outcome)
        self._unrecorded.append((trial, outcome))

    def _shares(self) -> tuple[float, float]:
        """The share of the time in which ranks trained, and the longest time between two trials."""
        spans = [sorted(each) for each in self._spans.values() if each]
        if not spans:
            return 0.0, 0.0
        begin = min(each[0][0] for each in spans)
        end = max(each[-1][1] for each in spans)
        worked = sum(e - b for each in spans for b, e in each)
        gaps = [b - e for each in spans for (_, e), (b, _) in itertools.pairwise(each)]
        return worked / (len(self._spans) * max(end - begin, 1e-9)), max(gaps, default=0.0)


# What the ranks of a trial find together, so that none is to blame.
_OF_ALL = ("diverged", "train returned")
