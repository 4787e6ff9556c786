"""Helpers for tests of PyTorch's optimizer: N ranks train like one process with all the data.

Every rank knows the whole batch, and takes its share of it. The oracle is a twin of the model,
which each rank trains on the whole batch with the plain optimizer.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import mpirun
import torch
from torch import nn

import hororing.torch as hvd
from hororing._requests.process_sets import ProcessSet, global_process_set

BATCH = 24  # a multiple of 1, 2, 3 and 4 ranks
STEPS = 6
TOLERANCE = 1e-12  # sums of at most 24 numbers of about 1, in another order

Loss = Callable[..., torch.Tensor]  # of a module and a batch
RankLoss = Callable[[nn.Module, int], torch.Tensor]  # the loss of a rank
Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def start() -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(mpirun.seed())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


def batches(steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(BATCH, 5), torch.randn(BATCH, 3)) for _ in range(steps)]


def share(whole: torch.Tensor, rank: int | None = None) -> torch.Tensor:
    return whole[hvd.rank() if rank is None else rank :: hvd.size()]


def squares(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


class Words(nn.Module):
    """A model with a parameter whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.out = nn.Linear(4, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(words))


def word_batches(steps: int) -> list[tuple[torch.Tensor]]:
    return [(torch.randint(0, 10, (BATCH,)),) for _ in range(steps)]


def outputs_squared(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().mean()


class Careless(hvd.Compression.none):
    """Sends another dtype on one rank while it is switched on."""

    broken: int | None = None

    @classmethod
    @contextlib.contextmanager
    def on(cls, rank: int) -> Iterator[None]:
        cls.broken = rank
        yield
        cls.broken = None

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        broken = cls.broken == hvd.rank() and tensor.shape == (6, 7)
        return (tensor.float() if broken else tensor), None

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.double()


def assert_same(model: nn.Module, twin: nn.Module, tolerance: float = TOLERANCE) -> None:
    assert_close(model, twin, tolerance)
    assert_equal_on_all_ranks(*model.parameters())


def assert_close(model: nn.Module, twin: nn.Module, tolerance: float = TOLERANCE) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


def assert_equal_on_all_ranks(*tensors: torch.Tensor) -> None:
    """Fail unless the bits are equal on all ranks."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    everywhere = hvd.allgather(flat.unsqueeze(0))
    assert all(torch.equal(row, flat) for row in everywhere)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data) -> None:
    for inputs, targets in data:
        optimizer.zero_grad()
        squares(model, share(inputs), share(targets)).backward()
        optimizer.step()


def backward(loss: torch.Tensor) -> None:
    """Call backward(), unless this rank has nothing to differentiate."""
    if loss.requires_grad:
        loss.backward()


def average_gradients(twin: nn.Module, loss: RankLoss) -> None:
    """Set the gradients of `twin` to the average over all ranks; a missing gradient is zero."""
    sums = [torch.zeros_like(param) for param in twin.parameters()]
    for rank in range(hvd.size()):
        twin.zero_grad()
        backward(loss(twin, rank))
        for total, param in zip(sums, twin.parameters(), strict=True):
            if param.grad is not None:
                total += param.grad
    for total, param in zip(sums, twin.parameters(), strict=True):
        if param.requires_grad:
            param.grad = total / hvd.size()


def distributed(
    module: nn.Module, make: Make | None = None, prefix: str = "", **options
) -> torch.optim.Optimizer:
    named = [(prefix + name, param) for name, param in module.named_parameters()]
    return hvd.DistributedOptimizer((make or sgd)(module.parameters()), named, **options)


class Twins:
    """A model with a DistributedOptimizer, and its twin with the plain one and all the data.

    Ranks outside the process set train alone, with all the data.
    """

    def __init__(
        self, make: Make | None = None, model: nn.Module | None = None, named: Any = True,
        loss: Loss = squares, process_set: ProcessSet = global_process_set, **options: object,
    ) -> None:  # fmt: skip
        make = make or sgd
        self.model = network() if model is None else model
        self.twin = copy.deepcopy(self.model)
        self.plain = make(self.twin.parameters())
        self.optimizer = make(self.model.parameters())
        names = self.model.named_parameters() if named is True else named or None
        options["process_set"] = process_set
        assert hvd.DistributedOptimizer(self.optimizer, names, **options) is self.optimizer
        self.loss = loss
        self.ranks = process_set.ranks if process_set.included() else [hvd.rank()]
        # The mean over all, times the number of ranks, is the sum of the ranks' means.
        self.factor = len(self.ranks) if options.get("op") == hvd.Sum else 1

    def share(self, whole: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        return whole[self.ranks.index(hvd.rank() if rank is None else rank) :: len(self.ranks)]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.plain.zero_grad()

    def backward(self, *batch: torch.Tensor) -> None:
        self.loss(self.model, *map(self.share, batch)).backward()
        (self.factor * self.loss(self.twin, *batch)).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.plain.step()

    def train(self, steps: int = STEPS, passes: int = 1, draw: Callable = batches) -> None:
        for _ in range(steps):
            self.zero_grad()
            for batch in draw(passes):
                self.backward(*batch)
            self.step()

    def train_by_rank(self, loss: RankLoss) -> None:
        """Take a step in which each rank has its own loss."""
        self.optimizer.zero_grad()
        backward(loss(self.model, hvd.rank()))
        self.optimizer.step()
        average_gradients(self.twin, loss)
        self.plain.step()

    def check(self, tolerance: float = TOLERANCE) -> None:
        if len(self.ranks) == hvd.size():
            assert_same(self.model, self.twin, tolerance)
        else:
            assert_close(self.model, self.twin, tolerance)


sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
plain_sgd = functools.partial(torch.optim.SGD, lr=0.1)
