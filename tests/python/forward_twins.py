"""Models with step_in_forward, each with a twin that trains with the ordinary DistributedOptimizer
on the same data: that is the oracle, and it has the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import mpirun
import torch
from torch import nn

import hororing.torch as hvd

BATCH = 6
Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]

MAKERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.02),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}


def start() -> None:
    hvd.init(process_sets="dynamic")
    torch.set_num_threads(1)
    torch.manual_seed(mpirun.seed())


class Peculiar(nn.Module):
    """What the order of modules does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 3)  # registered first, used last
        self.scale = nn.Parameter(torch.ones(8))  # of no module below
        self.twice = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)  # uses its part's weight
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.twice.weight
        self.sometimes = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.never = nn.Linear(2, 2)
        self.first = nn.Linear(5, 8)
        for param in self.frozen.parameters():
            param.requires_grad_(False)

    def forward(self, inputs: torch.Tensor, step: int = 0) -> torch.Tensor:
        x = self.twice(torch.tanh(self.first(inputs)))
        x = self.norm(self.frozen(torch.tanh(self.twice(x))))
        x = self.tied(torch.tanh(x)) * self.scale
        if step % 2 == 1:
            x = x + self.sometimes(x)
        sequence = x.unsqueeze(0)
        x = x + self.attention(sequence, sequence, sequence, need_weights=False)[0].squeeze(0)
        if step % 3 == 2:
            x = nn.functional.linear(x, self.attention.out_proj.weight)
        if not self.training:  # another way, around the module's forward
            return nn.functional.linear(torch.tanh(x), self.last.weight, self.last.bias)
        return self.last(torch.tanh(x))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


def pair(
    model: nn.Module, make: Make = MAKERS["sgd"], **options: Any
) -> tuple[tuple[nn.Module, Any], tuple[nn.Module, Any]]:
    """The model and its twin, each with its optimizer."""
    twin = copy.deepcopy(model)
    named = [(f"twin.{name}", param) for name, param in twin.named_parameters()]
    ordinary = hvd.DistributedOptimizer(make(twin.parameters()), named, **options)
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), **options, step_in_forward=model
    )
    return (model, optimizer), (twin, ordinary)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = torch.randn(2, BATCH * hvd.size(), 5).unbind()
    return inputs[hvd.rank() :: hvd.size()], targets[hvd.rank() :: hvd.size(), :3]


def squares(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def train(both: Any, steps: int = 4, loss: Any = squares) -> None:
    for _ in range(steps):
        inputs, targets = batch()
        for model, optimizer in both:
            optimizer.zero_grad()
            loss(model, inputs, targets).backward()
            optimizer.step()


def assert_same_bits(both: Any) -> None:
    """And the same state of the optimizers; finishes the step."""
    (model, optimizer), (twin, ordinary) = both
    optimizer.finish_step()
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), name
    states = optimizer.state_dict()["state"], ordinary.state_dict()["state"]
    assert states[0].keys() == states[1].keys()
    for key, mine in states[0].items():
        for what, value in mine.items():
            other = states[1][key][what]
            same = torch.equal(value, other) if torch.is_tensor(value) else value == other
            assert same, (key, what)


def is_due(optimizer: Any) -> bool:
    steps = getattr(optimizer, "_steps", None)
    return steps is not None and steps.any_due
