"""What a step consists of, from a timeline: when each tensor was ready, and what reducing took.

A step of a rank has phases. In a phase, a rank submits tensors without waiting for them; between
two phases it waits for the first one's results. Gradients that hooks submit are one phase, a loss
that is averaged in a blocking call is another one.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hororing.toolkit.stragglers import read_timeline

Array = NDArray[np.float64]

# Unnamed calls are counted; without the number, names repeat in every step.
_COUNTED = re.compile(r"\.noname\.\d+")
_LEAST_STEPS = 5


@dataclass(frozen=True)
class Phase:
    """Tensors that are submitted without waiting for one another.

    `ready_s`: when each tensor was submitted, in seconds from the time at which its rank had the
    results of the phase before, (steps, ranks, tensors).
    """

    names: tuple[str, ...]
    nbytes: Array  # (tensors,)
    ready_s: Array


@dataclass(frozen=True)
class Profile:
    """Recorded steps.

    Attributes
    ----------
    hosts : list of str
        By rank.
    phases : list of Phase
        Of a step.
    step_s : array
        Seconds of each step, from end to end, (steps,).
    batches : array
        Bytes and seconds of each allreduce, (batches, 2); from the time at which the last rank
        takes part.
    """

    hosts: list[str]
    phases: list[Phase]
    step_s: Array
    batches: Array

    @property
    def compute_s(self) -> Array:
        """What each rank computed in each step, (steps, ranks); waiting for input counts, too."""
        total: Array = sum(phase.ready_s.max(axis=2) for phase in self.phases)
        return total


@dataclass
class _Step:
    """One step of one rank: for each phase, tensor -> (seconds, bytes)."""

    phases: list[dict[str, tuple[float, int]]]
    end: float


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read the steps in a timeline; those that differ from most are left out.

    Raises
    ------
    OSError, ValueError : no such file; not a timeline; fewer than five equal steps of all ranks;
        steps with collectives other than allreduce, or in process sets.
    """
    hosts = read_timeline(path).hosts  # checks the file
    with open(path, encoding="utf-8") as file:
        events = json.load(file)
    by_rank: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if "ts" in event:
            by_rank[event["pid"] - 1].append(event)
    for each in by_rank.values():
        each.sort(key=lambda event: float(event["ts"]))
    read = [_submits(by_rank[rank]) for rank in range(len(hosts))]
    apart = _apart([submits for submits, _ in read])
    steps = [_steps(submits, ends, apart) for submits, ends in read]
    usual, first = _usual(steps[0])
    for rank, (submits, ends) in enumerate(read):
        if _usual(steps[rank])[0] != usual:  # its first calls are missing
            called = [each.name for each in submits]
            begin = called.index(first) if first in called else len(called)
            steps[rank] = _steps(submits[begin:], ends, apart)
    rows = [row for row in _rows(steps) if all(_shape(step) == usual for step in row)]
    if len(hosts) < 2 or len(rows) < _LEAST_STEPS:
        raise ValueError(
            f"{os.fspath(path)!r} has {len(rows)} equal steps of {len(hosts)} ranks; a prediction "
            f"needs at least {_LEAST_STEPS} of two"
        )
    _check_kinds(events, usual)
    phases = []
    for number, names in enumerate(usual):
        ready = [[[step.phases[number][n][0] for n in names] for step in row] for row in rows]
        nbytes = [rows[0][0].phases[number][name][1] for name in names]
        phases.append(Phase(names, np.array(nbytes, float), np.array(ready)))
    own = np.diff(np.array([max(step.end for step in row) for row in rows]))
    own = own[own < 3 * np.median(own)]  # steps were left out between the others
    return Profile(hosts, phases, own, _batches(by_rank, len(hosts)))


@dataclass(frozen=True)
class _Submit:
    """A call of a rank: when, and when its result was there; microseconds."""

    name: str
    nbytes: int
    at: float
    done: float
    hooked: bool


def _submits(events: list[dict[str, Any]]) -> tuple[list[_Submit], list[float]]:
    """The calls of a rank, and the ends of its batches."""
    hooked = {event["args"]["tensor"] for event in events if event["name"] == "HOOK"}
    ends = [float(each["ts"] + each["dur"]) for each in events if each["name"] == "COMPLETE"]
    names = {
        event["id"]: event["args"].get("tensor", "")
        for event in events
        if event.get("cat") == "negotiate" and event["ph"] == "b"
    }
    agreed: defaultdict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "negotiate" and event["ph"] == "e" and event["id"] in names:
            agreed[names[event["id"]]].append(float(event["ts"]))
    found = []
    for event in events:
        if event["name"] != "SUBMIT" or event["args"].get("process_set", 0):
            continue
        tensor, at = event["args"]["tensor"], float(event["ts"])
        begins = agreed[tensor]
        number = bisect.bisect_left(begins, at)
        done = at + float(event["dur"])  # of a small sum that is not negotiated
        if number < len(begins):
            last = bisect.bisect_left(ends, begins[number])
            done = ends[last] if last < len(ends) else done
        nbytes = int(event["args"].get("bytes", 0))
        found.append(_Submit(_COUNTED.sub("", tensor), nbytes, at, done, tensor in hooked))
    return found, ends


def _steps(submits: list[_Submit], ends: list[float], apart: set[tuple[str, str]]) -> list[_Step]:
    """The steps of a rank but for the first, of which it is not known when it began.

    `apart`: pairs of calls of which the second one never came before the result of the first.
    """
    steps: list[_Step] = []
    phases: list[dict[str, tuple[float, int]]] = []
    seen: set[str] = set()
    free, before = 0.0, None
    for each in submits:
        new_step = each.name in seen
        last = bisect.bisect_right(ends, each.at)
        if new_step:
            steps.append(_Step(phases, ends[last - 1] * 1e-6 if last else each.at * 1e-6))
            phases, seen = [], set()
        if before is None or new_step or (before.name, each.name) in apart:
            free = ends[last - 1] if last else each.at
            phases.append({})
        seen.add(each.name)
        phases[-1][each.name] = ((each.at - free) * 1e-6, each.nbytes)
        before = each
    return steps[1:]


def _apart(of_ranks: list[list[_Submit]]) -> set[tuple[str, str]]:
    """Pairs of calls that follow each other, where the second waits for the first one's result.

    Gradients of hooks do not, even where the network is so fast that it looks like that.
    """
    pairs: set[tuple[str, str]] = set()
    beside: set[tuple[str, str]] = set()
    for submits in of_ranks:
        for first, second in itertools.pairwise(submits):
            pair = (first.name, second.name)
            pairs.add(pair)
            if second.at < first.done or (first.hooked and second.hooked):
                beside.add(pair)
    return pairs - beside


def _shape(step: _Step) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(sorted(phase)) for phase in step.phases)


def _usual(steps: list[_Step]) -> tuple[tuple[tuple[str, ...], ...], str]:
    """The phases of most steps, and the name with which they begin."""
    if not steps:
        return (), ""
    usual = Counter(map(_shape, steps)).most_common(1)[0][0]
    firsts = Counter(next(iter(step.phases[0])) for step in steps if _shape(step) == usual)
    return usual, firsts.most_common(1)[0][0]


def _rows(steps: list[list[_Step]]) -> list[list[_Step]]:
    """The steps of all ranks that ended together, as the ranks had waited for one another."""
    own = np.array([step.end for step in steps[0]])
    if len(own) < 2 or not all(steps):
        return []
    near = float(np.median(np.diff(own))) / 2
    rows = []
    for step in steps[0]:
        row = [min(each, key=lambda other: abs(other.end - step.end)) for each in steps]
        if all(abs(each.end - step.end) < near for each in row):
            rows.append(row)
    return rows


def _check_kinds(events: Iterable[dict[str, Any]], usual: tuple[tuple[str, ...], ...]) -> None:
    """Refuse other collectives than sums, but not the broadcasts before a rank's first sum."""
    used = {name for names in usual for name in names}
    stepping = set()  # ranks
    for event in sorted(events, key=lambda event: float(event.get("ts", 0))):
        if event.get("cat") != "negotiate" or event.get("ph") != "b":
            continue
        name = _COUNTED.sub("", event["args"].get("tensor", ""))
        kind = event["name"].removeprefix("NEGOTIATE_")
        before = kind == "BROADCAST" and event["pid"] not in stepping
        if name not in used or before:
            continue
        stepping.add(event["pid"])
        if kind not in ("ALLREDUCE", "BARRIER"):
            raise ValueError(f"steps have {kind} {name!r}; predictions know allreduce only")
        if event["args"].get("process_set", 0):
            raise ValueError("steps use process sets; predictions know those of all ranks only")


def _batches(by_rank: dict[int, list[dict[str, Any]]], size: int) -> Array:
    """Bytes and seconds of each batch, from the last rank's begin to the last rank's end.

    Batches have one order on all ranks.
    """
    rows = [
        [each for each in by_rank[rank] if each["name"] == "ALLREDUCE" and each["ph"] == "X"]
        for rank in range(size)
    ]
    found = []
    for batch in zip(*rows, strict=False):
        begin = max(float(each["ts"]) for each in batch)
        end = max(float(each["ts"] + each["dur"]) for each in batch)
        found.append((float(batch[0]["args"].get("bytes", 0)), (end - begin) * 1e-6))
    return np.array(found).reshape(-1, 2)
