"""What the guard of PyTorch costs, and whether it is silent, on one host.

    mpirun -np 2 python benchmarks/guard.py                    # sums, and training steps
    mpirun -np 2 python benchmarks/guard.py --soak 100000      # steps without a false alarm

Sums of 64 MiB and of 4 bytes are looked at or not, in turns; steps of the models of torch_step.py
have a guard with every=100 or none. The soak has batch norm, dropout, bfloat16, and joins.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from record import Row, arguments, print_rows, save
from torch import nn
from torch_step import BATCH, MODELS
from turns import summary, take_turns

import hororing.torch as hvd
from hororing.guard import sums

WAYS = ("without", "with")


@contextmanager
def looking(on: bool) -> Iterator[None]:
    """Look at sums, or do not, although a guard asks for it."""
    sums.watch(on)
    try:
        yield
    finally:
        sums.watch(not on)


class Training:
    """Steps of a fresh model."""

    def __init__(self, who: str, model: nn.Module, shape: tuple[int, ...]) -> None:
        self.model = model
        optimizer = torch.optim.Adam(model.parameters(), 1e-4)
        named = model.named_parameters(prefix=who)
        self.optimizer = hvd.DistributedOptimizer(optimizer, named)
        self.x, self.y = torch.randn(BATCH, *shape), torch.randint(0, 10, (BATCH,))
        self.loss = nn.CrossEntropyLoss()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model(self.x), self.y).backward()
        self.optimizer.step()


def costs(order: random.Random, seconds: float, rounds: tuple[int, int]) -> list[Row]:
    """Return the times of sums, and of steps."""
    rows: list[Row] = []
    for case, elements, calls in (("64 MiB", 16 << 20, 1), ("4 B", 1, 2000)):
        tensor = torch.ones(elements)

        def add(tensor: torch.Tensor = tensor) -> None:
            hvd.synchronize(hvd.allreduce_async_(tensor, name="sum"))

        times = take_turns(
            dict.fromkeys(WAYS, add), order, calls=calls, seconds=4 * seconds, rounds=rounds,
            around={"with": lambda: looking(True)},
        )  # fmt: skip
        rows += [
            {"measure": "sum", "case": case, "who": who, **summary(times[who])} for who in WAYS
        ]
    for case, (make, calls) in MODELS.items():
        trainings = {}
        for who in WAYS:
            torch.manual_seed(1)
            trainings[who] = Training(who, *make())
        guarded = trainings["with"]
        guard = hvd.Guard(guarded.model, guarded.optimizer, every=100)
        times = take_turns(
            {who: each.step for who, each in trainings.items()}, order, calls=calls,
            seconds=16 * seconds, rounds=rounds, around={"without": lambda: looking(False)},
        )  # fmt: skip
        guard.close()
        rows += [
            {"measure": "step", "case": case, "who": who, **summary(times[who])} for who in WAYS
        ]
    return rows


def soak(steps: int) -> None:
    """Train so many steps. AssertionError if the guard has found anything."""
    torch.manual_seed(1)
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 10)]
    training = Training("soak", nn.Sequential(*layers), (16,))
    model, optimizer = training.model, training.optimizer
    hvd.broadcast_parameters(model.state_dict(), 0)
    guard = hvd.Guard(model, optimizer, every=100, on_divergence="warn")
    torch.manual_seed(hvd.rank())  # dropout
    began, epochs, length = time.perf_counter(), max(1, steps // 1000), min(steps, 1000)
    for epoch in range(epochs):
        last = epoch % hvd.size() == hvd.rank()
        for step in range(length if last else length - 1 - (hvd.rank() + epoch) % 5):
            training.x.normal_()
            with torch.autocast("cpu", torch.bfloat16, enabled=step % 2 == 0):
                training.step()
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
    report = guard.report()
    found = [each["text"] for each in report["findings"]]
    if hvd.rank() == 0:
        took = time.perf_counter() - began
        print(
            f"{epochs * length} steps, {report['comparisons']} comparisons, {took:.0f} s: {found}"
        )
    assert not found, found


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--soak", type=int, metavar="STEPS", help="only train so many steps")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    hvd.init()
    if options.soak:
        soak(options.soak)
        return
    rounds = (1, 1) if options.quick else (20, 400)
    rows = costs(random.Random(options.seed), options.seconds, rounds)
    if hvd.rank() == 0:
        for at in range(0, len(rows), 2):
            print_rows(rows[at : at + 2], base="without")
        save(options.json, rows)


if __name__ == "__main__":
    main()
