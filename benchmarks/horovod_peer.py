"""Horovod as a contestant, which runs only during its turns.

Horovod's thread wakes up every cycle, even without work, and spins in an MPI call with those of the
other ranks, which would slow down the other contestants. So Horovod is initialized before each of
its turns and shut down after it, outside the timed part; the warm-up call makes its tensors known
again. Since Horovod reads its environment each time, it takes part twice: with its default cycle of
1 ms, and with one of 0.1 ms, in which small sums wait less.

`make bench-horovod` builds Horovod into build/horovod; an installed one is used as well.
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
    """Wait for all ranks, without using a core."""
    everybody = MPI.COMM_WORLD.Ibarrier()
    while not everybody.Test():
        time.sleep(20e-6)


class Horovod:
    """Horovod with one cycle time. `verbs` is the module horovod.torch."""

    def __init__(self, verbs: Any, cycle_ms: str) -> None:
        self.verbs = verbs
        self.cycle_ms = cycle_ms

    @contextlib.contextmanager
    def awake(self) -> Iterator[Any]:
        """Initialize Horovod, and shut it down at the end. Call it on all ranks together."""
        # Unset again at once: hororing reads that variable, too.
        with mock.patch.dict(os.environ, HOROVOD_CYCLE_TIME=self.cycle_ms):
            self.verbs.init()
        yield self.verbs
        # The first rank that shuts down also ends the calls of the others.
        wait_asleep()
        self.verbs.shutdown()

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` in place."""
        self.verbs.allreduce_(tensor, op=self.verbs.Sum, name="benchmark")

    def optimizer(
        self, optimizer: torch.optim.Optimizer, named: Iterator[tuple[str, torch.nn.Parameter]]
    ) -> torch.optim.Optimizer:
        """Return Horovod's DistributedOptimizer. Its steps need `awake`."""
        with self.awake() as verbs:
            return verbs.DistributedOptimizer(optimizer, named)


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add --horovod: the cycle times that `found` takes."""
    parser.add_argument("--horovod", nargs="*", choices=NAMES, default=list(NAMES),
                        help="Horovod's cycle times in ms, if it is installed")  # fmt: skip


def found(cycles_ms: list[str]) -> dict[str, Horovod]:
    """Return Horovod by name; {} if it is not installed. Ignores `hororing.as_horovod`."""
    if not cycles_ms:
        return {}
    if (BUILT / ".ready").exists() and str(BUILT / "site") not in sys.path:
        sys.path.append(str(BUILT / "site"))
    if importlib.util.find_spec("horovod") is None:
        return {}
    verbs = importlib.import_module("horovod.torch")
    if not hasattr(verbs, "init"):  # Horovod has printed the reason
        raise RuntimeError("Horovod's library does not load here: make bench-horovod builds it")
    return {NAMES[cycle_ms]: Horovod(verbs, cycle_ms) for cycle_ms in cycles_ms}
