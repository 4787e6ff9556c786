"""The same training with DistributedOptimizer and with torch's DistributedDataParallel."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import mpirun
import session
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hororing.torch as hvd

STEPS = 8
ROWS = 6  # per rank and step

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: list[Make] = [
    lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
    lambda params: torch.optim.AdamW(params, lr=0.01),
]


def start() -> None:
    hvd.init()
    torch.set_num_threads(1)
    # A unique name, which rank 0 broadcasts with hororing.
    meeting = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}/ranks", rank=hvd.rank(), world_size=hvd.size()
    )
    dist.barrier()
    if hvd.rank() == 0:
        Path(meeting, "ranks").unlink(missing_ok=True)
        os.rmdir(meeting)


class Network(nn.Module):
    """A network with a convolution, a parameter that is used twice, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 4, 3, padding=1)
        self.twice = nn.Linear(5, 5)
        self.last = nn.Linear(20, 3)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.twice(self.twice(x))).unsqueeze(1)
        return self.last((self.convolution(x) * self.scale).flatten(1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, passes: int) -> None:
    numbers = torch.Generator().manual_seed(mpirun.seed() + hvd.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for number in range(passes):
            inputs = torch.randn(ROWS, 5, generator=numbers, dtype=torch.float64)
            targets = torch.randn(ROWS, 3, generator=numbers, dtype=torch.float64)
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = number == passes - 1
            nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def compare(make: Make, passes: int = 1) -> None:
    torch.manual_seed(hvd.rank())  # so that the source of the weights matters
    ours = Network().double()
    hvd.broadcast_parameters(ours.state_dict(), root_rank=0)
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    optimizer = hvd.DistributedOptimizer(
        make(ours.parameters()), ours.named_parameters(), backward_passes_per_step=passes
    )
    train(ours, optimizer, passes)
    train(theirs, make(theirs.parameters()), passes)
    for (name, mine), other in zip(
        ours.named_parameters(), theirs.module.parameters(), strict=True
    ):
        torch.testing.assert_close(
            mine, other, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


def case_weights_after_training_agree():
    start()
    for make in OPTIMIZERS:
        compare(make)


def case_accumulated_gradients_agree():
    for make in OPTIMIZERS:
        compare(make, passes=3)
    dist.destroy_process_group()


test_on_ranks = session.on_ranks(globals(), 2, 3, session="torch")
