"""The timing of the benchmarks: contestants take turns.

All contestants of a measure run in the same processes on the same memory. They take turns in random
order, with short series of calls, so that other load on the machine affects all of them alike. A
series begins on all ranks at one instant of their common clock, after a warm-up call. Before that
they sleep: a barrier that spins would take cores from contestants with threads. The time of a call
is that of its series over the number of calls, on the slowest rank. On a shared machine, only
ratios are meaningful.

Uses MPI for the common start, and knows nothing about what it times.
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
    """Sleep until all ranks are here; return at one instant on all of them, with warm caches."""
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

    A series has `calls` calls. Each way gets `seconds` in all, but at least rounds[0] and at most
    rounds[1] series. The first round is a warm-up and estimates how many fit. A way's `around` is
    entered before each of its turns and left after it, outside the timed part.
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
    """Return median and spread of a way's series, in microseconds per call."""
    low, median, high = np.percentile(seconds * 1e6, (10, 50, 90))
    return {"median_us": median, "p10_us": low, "p90_us": high, "series": len(seconds)}
