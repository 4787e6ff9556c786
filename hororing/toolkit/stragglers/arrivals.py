"""When each rank was ready for each collective, from a timeline."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Unnamed calls are counted (_requests/names.py); without the number, names repeat in every step.
_COUNTED = re.compile(r"\.noname\.\d+")
# So are calls of torch.distributed (hororing/torch/distributed). Those of one size repeat.
_NUMBERED = re.compile(r"group\d+\.\d+(\.then\d+\.\d+)*")

LEAST_S = 1e-3  # no rank is late by less


@dataclass(frozen=True)
class Collective:
    """One collective: seconds at which each rank was ready for it, NaN where it took no part."""

    name: str
    process_set: int
    arrivals: Array  # (ranks,)

    @property
    def lateness(self) -> Array:
        """Seconds behind the first rank, (ranks,)."""
        behind: Array = self.arrivals - np.nanmin(self.arrivals)
        return behind


@dataclass(frozen=True)
class Recording:
    """The record of a job; `hosts` by rank, `collectives` in the order of their ends."""

    hosts: list[str]
    collectives: list[Collective]


def read_timeline(path: str | os.PathLike[str]) -> Recording:
    """The arrivals in a timeline, on rank 0's clock; also of a job that was killed.

    Of a file that holds the last part only (HORORING_TIMELINE_BYTES), what all ranks still have.

    Raises
    ------
    OSError, ValueError : no such file; not a timeline of hororing.
    """
    with open(path, encoding="utf-8") as file:
        try:
            events = json.load(file)
        except ValueError as error:  # no JSON, or no text
            raise ValueError(f"{os.fspath(path)!r} is not a timeline: {error}") from None
    hosts: dict[int, str] = {}
    # For one key the ranks record the same negotiations, in the same order.
    starts: defaultdict[tuple[int, str, str], defaultdict[int, list[float]]]
    starts = defaultdict(lambda: defaultdict(list))
    sizes: dict[tuple[int, str, str], int] = {}
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError(f"{os.fspath(path)!r} is not a timeline: it is not a list of events")
    # Then the first ones of some ranks are missing, and later ones stand before earlier ones.
    wrapped = any(event.get("name") == "process_labels" for event in events)
    if wrapped:
        events.sort(key=lambda event: event.get("ts", 0))
    for event in events:
        rank = event.get("pid", 0) - 1
        args: dict[str, Any] = event.get("args", {})
        if event.get("name") == "process_name":
            found = re.fullmatch(r"rank \d+ \((.*)\)", args.get("name", ""), re.DOTALL)
            hosts[rank] = found[1] if found else ""
        elif event.get("cat") == "negotiate" and event.get("ph") == "b":
            key = (args.get("process_set", 0), event["name"], args.get("tensor", ""))
            sizes.setdefault(key, args.get("bytes", 0))
            nothing = args.get("joined", False)
            starts[key][rank].append(np.nan if nothing else event["ts"] * 1e-6)
    if sorted(hosts) != list(range(len(hosts))) or not hosts:
        raise ValueError(f"{os.fspath(path)!r} is not a timeline: it does not name its ranks")
    members: defaultdict[int, set[int]] = defaultdict(set)
    members[0].update(hosts)
    for (process_set, _, _), by_rank in starts.items():
        members[process_set].update(by_rank)
    collectives = []
    for (process_set, kind, tensor), by_rank in starts.items():
        name = _COUNTED.sub("", tensor)
        if _NUMBERED.fullmatch(tensor):
            name = f"{kind} of {sizes[process_set, kind, tensor]} bytes"
        ranks = sorted(members[process_set])
        # The latest ones of some ranks are missing where the job was killed.
        of_ranks = [by_rank.get(rank, []) for rank in ranks]
        if wrapped:
            common = min(map(len, of_ranks))
            of_ranks = [each[len(each) - common :] for each in of_ranks]
        for times in zip(*of_ranks, strict=False):
            arrivals = np.full(len(hosts), np.nan)
            arrivals[ranks] = times
            if np.count_nonzero(np.isfinite(arrivals)) > 1:
                collectives.append(Collective(name, process_set, arrivals))
    collectives.sort(key=lambda collective: float(np.nanmax(collective.arrivals)))
    return Recording([hosts[rank] for rank in range(len(hosts))], collectives)


def steps(collectives: list[Collective]) -> list[list[Array]]:
    """When each rank had submitted the last tensor of each step, in seconds, (ranks,).

    A step of a process set ends where a name repeats. It has several parts if ranks wait within it,
    such as for their gradients and then for an averaged loss. The steps of all sets are ordered by
    the time at which their last rank arrived.
    """
    rows: list[list[Array]] = []
    last: dict[int, list[Array]] = {}  # the current step of each process set
    seen: defaultdict[int, set[str]] = defaultdict(set)
    for collective in collectives:
        names, number = seen[collective.process_set], collective.process_set
        if collective.name in names:
            rows.append(last.pop(number))
            names.clear()
        names.add(collective.name)
        parts = last.setdefault(number, [])
        if not parts or _waited(parts[-1], collective.arrivals):
            parts.append(collective.arrivals)
        else:
            # A rank that takes part in some of a step's collectives only has joined.
            parts[-1] = np.fmax(parts[-1], collective.arrivals)
    rows += last.values()
    rows.sort(key=lambda parts: float(np.nanmax(parts[-1])))
    return rows


def _waited(before: Array, after: Array) -> bool:
    """Whether ranks waited for the last one before they submitted the next tensor.

    They were all silent until it arrived, and it has made up for its delay since. A rank that is
    late with one gradient and waits for nobody is late with the next one, too.
    """
    behind = before - np.nanmin(before)
    late = np.nanargmax(behind)
    silent = bool(np.nanmin(after) >= before[late])
    return silent and behind[late] > LEAST_S and after[late] - np.nanmin(after) < behind[late] / 2
