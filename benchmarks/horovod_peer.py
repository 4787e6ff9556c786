"""Horovod as a contestant, which is awake only while it is its turn.

Its thread wakes up every cycle, whether there is anything to do or not, and meets those of the
other ranks in MPI, where it spins. Others would pay for that. So it is initialised before each of
its turns and shut down after it, outside of what is timed; the call that warms up makes its tensors
known to it again. As it reads its environment anew, there can be two of it: as it comes, with a
cycle of 1 ms, and with one of 0.1 ms, for which small sums wait less.

`make bench-horovod` builds it into build/horovod; any other that can be imported will do.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from mpi4py import MPI

BUILT = Path(__file__).parents[1] / "build/horovod"
NAMES = {"1": "Horovod", "0.1": "Horovod, 0.1 ms"}  # by cycle time, in ms; 1 is its default


def wait_asleep() -> None:
    """For all ranks, without taking anybody's core."""
    everybody = MPI.COMM_WORLD.Ibarrier()
    while not everybody.Test():
        time.sleep(20e-6)


class Horovod:
    """`verbs` is the module horovod.torch."""

    def __init__(self, verbs: Any, cycle_ms: str) -> None:
        self.verbs = verbs
        self.cycle_ms = cycle_ms

    @contextlib.contextmanager
    def awake(self) -> Iterator[Any]:
        """Its verbs can be called; on all ranks together."""
        # Only for a moment: hororing reads that variable, too, wherever it is initialised.
        with mock.patch.dict(os.environ, HOROVOD_CYCLE_TIME=self.cycle_ms):
            self.verbs.init()
        yield self.verbs
        # The first rank to shut down ends the others' calls, too.
        wait_asleep()
        self.verbs.shutdown()

    def sum(self, tensor: torch.Tensor) -> None:
        """In place."""
        self.verbs.allreduce_(tensor, op=self.verbs.Sum, name="benchmark")

    def optimizer(
        self, optimizer: torch.optim.Optimizer, named: Iterator[tuple[str, torch.nn.Parameter]]
    ) -> torch.optim.Optimizer:
        """Its DistributedOptimizer, which must not step but while it is awake."""
        with self.awake() as verbs:
            return verbs.DistributedOptimizer(optimizer, named)


def add_option(parser: argparse.ArgumentParser) -> None:
    """Which of them take part: what `found` is asked for."""
    parser.add_argument("--horovod", nargs="*", choices=NAMES, default=list(NAMES),
                        help="its cycle times in ms, where it is installed")  # fmt: skip


def found(cycles_ms: list[str]) -> dict[str, Horovod]:
    """By name; none where it is not installed (`hororing.as_horovod` is not meant)."""
    if not cycles_ms:
        return {}
    if (BUILT / ".ready").exists() and str(BUILT / "site") not in sys.path:
        sys.path.append(str(BUILT / "site"))
    if importlib.util.find_spec("horovod") is None:
        return {}
    verbs = importlib.import_module("horovod.torch")
    if not hasattr(verbs, "init"):  # it has said why
        raise RuntimeError("Horovod's library does not load here: make bench-horovod builds it")
    return {NAMES[cycle_ms]: Horovod(verbs, cycle_ms) for cycle_ms in cycles_ms}
