"""Contestants take turns: the one way in which everything here is timed.

All contestants of a measure run in the same processes on the same memory. They take turns, in
random order, with short series of calls, so that what else the machine does hits all of them
alike. A series begins on all ranks at one instant of their common clock, after a call that does
not count; before it they sleep, since a barrier that spins would take the cores away from those
who work in threads. A call's time is that of its series by the series' length, on the slowest
rank. Only ratios mean anything on a shared machine.

Knows MPI, for the ranks' common clock, and nothing of what it times.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import numpy as np
from mpi4py import MPI

Way = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)
Around = Mapping[Name, Callable[[], AbstractContextManager[object]]]


def start_together(warm: Way) -> float:
    """Wait, asleep, for all ranks; return at the same instant everywhere, with warm caches."""
    everybody = MPI.COMM_WORLD.Ibarrier()
    while not everybody.Test():
        time.sleep(20e-6)
    warm()
    start = MPI.COMM_WORLD.bcast(time.perf_counter() + 100e-6)
    while time.perf_counter() < start:
        pass
    return start


def take_turns(
    ways: Mapping[Name, Way],
    order: random.Random,
    *,
    calls: int = 1,
    seconds: float = 1.0,
    rounds: tuple[int, int] = (7, 200),
    around: Around[Name] | None = None,
) -> dict[Name, np.ndarray]:
    """Time `ways`; return the seconds per call of every series, on the slowest rank.

    `calls` make a series, `seconds` is the time for each way; `rounds` bounds how many series fit
    it. The first round warms up, and says how many will fit. What is `around` a way's turn, and is
    not timed, begins before it and ends after it.
    """
    times: dict[Name, list[float]] = {name: [] for name in ways}
    done, count = -1, 1
    while done < count:
        begin_of_round = time.perf_counter()
        names = list(ways)
        order.shuffle(names)
        for name in names:
            way = ways[name]
            with (around or {}).get(name, nullcontext)():
                begin = start_together(way)
                for _ in range(calls):
                    way()
                elapsed = time.perf_counter() - begin
            if done >= 0:
                times[name].append(elapsed / calls)
        if done < 0:
            fitting = int(len(ways) * seconds / (time.perf_counter() - begin_of_round))
            count = MPI.COMM_WORLD.bcast(max(rounds[0], min(rounds[1], fitting)))
        done += 1
    return {
        name: np.max(MPI.COMM_WORLD.allgather(np.array(series)), axis=0)
        for name, series in times.items()
    }


def summary(seconds: np.ndarray) -> dict[str, float]:
    """Median and spread of a way's series, in microseconds per call."""
    low, median, high = np.percentile(seconds * 1e6, (10, 50, 90))
    return {"median_us": median, "p10_us": low, "p90_us": high, "series": len(seconds)}
