"""What torch.distributed costs over hororing and over gloo, on one host.

    mpirun -np 2 python benchmarks/ddp.py
    mpirun -np 2 -x LOCAL_WORLD_SIZE=2 python benchmarks/ddp.py    # tells gloo: one host

    hororing       DistributedDataParallel with hororing's process group
    gloo           DistributedDataParallel with gloo's
    alone          DistributedDataParallel with a hook that returns each bucket unchanged: the cost
                   of DDP itself, whatever the backend
    ... views      the first three with gradient_as_bucket_view=True
    optimizer      hororing's DistributedOptimizer; for one tensor, hororing's own allreduce_
    plain          no communication: the baseline for the overhead of the others

Models: `200 layers` of torch_step.py, and `ResNet-50`, whose loss is the sum of its 161 parameters,
so that a step fills 102 MB of gradients and computes next to nothing. Each rank computes with one
thread and makes no optimizer step. `64 MiB` is one all_reduce of float32. All variants take turns
in the same processes (turns.py). The overhead is the median, over rounds, of the difference to
plain's series of the same round.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import peers
import shapes
import torch
import torch.distributed as dist
from record import Row, arguments, print_rows, save
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_step import layers_200
from turns import Way, summary, take_turns

import hororing.torch as hvd

MIB = 1 << 20
BATCH = 32


class Sums(nn.Module):
    """A model of which only the gradients matter: the sum of all parameters of ResNet-50."""

    def __init__(self) -> None:
        super().__init__()
        every = shapes.tensors(shapes.resnet50())
        self.parts = nn.ParameterList(torch.zeros(shape) for shape in every)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:  # the last layer's gradient comes first
            x = x + part.sum()
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "200 layers": (lambda: layers_200()[0], (BATCH, 64)),
    "ResNet-50": (Sums, (1,)),
}


def as_it_is(_, bucket):  # DDP does not understand annotations that are strings
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def training(way: str, model: str, groups: dict[str, Any]) -> Way:
    """Return a function that computes the gradients of one step of a fresh model."""
    torch.manual_seed(1)
    make, shape = MODELS[model]
    module = make()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), 0.0)
    if way == "optimizer":
        optimizer = hvd.DistributedOptimizer(optimizer, module.named_parameters())
    elif way != "plain":
        name, _, views = way.partition(", ")
        ddp = DistributedDataParallel(
            module, process_group=groups.get(name), gradient_as_bucket_view=bool(views)
        )
        if name == "alone":
            ddp.register_comm_hook(None, as_it_is)
        module = ddp
    x = torch.ones(shape)

    def step() -> None:
        module(x).sum().backward()
        if way == "optimizer":
            optimizer.synchronize()
        optimizer.zero_grad()  # frees memory for the others

    return step


def of_one_tensor(groups: dict[str, Any]) -> dict[str, Way]:
    tensor = torch.zeros(16 * MIB).fill_(0.0)  # its own pages, not the shared zero page
    ways: dict[str, Way] = {
        name: lambda group=group: dist.all_reduce(tensor, group=group)
        for name, group in groups.items()
    }
    return ways | {"optimizer": lambda: hvd.allreduce_(tensor, op=hvd.Sum, name="benchmark")}


def rows_of(case: str, times: dict[str, np.ndarray]) -> list[Row]:
    rows = []
    for who, series in times.items():
        row = {"measure": "torch.distributed", "case": case, "who": who, **summary(series)}
        if "plain" in times:
            low, median, high = np.percentile((series - times["plain"]) * 1e6, (10, 50, 90))
            row |= {"overhead_us": median, "overhead_p10_us": low, "overhead_p90_us": high}
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="+", choices=[*MODELS, "64 MiB"])
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    hvd.init()
    peers.join_gloo()
    groups = {"hororing": dist.new_group(backend="hororing"), "gloo": dist.group.WORLD}
    order = random.Random(options.seed)
    rows: list[Row] = []
    for case in options.cases or (["200 layers"] if options.quick else [*MODELS, "64 MiB"]):
        ddps = [*groups, "alone"]
        names = ["plain", *ddps, *(f"{name}, views" for name in ddps), "optimizer"]
        ways = (
            {way: training(way, case, groups) for way in names}
            if case in MODELS
            else of_one_tensor(groups)
        )
        rounds = (1, 1) if options.quick else (9, 60)
        calls = 5 if case == "200 layers" and not options.quick else 1
        times = take_turns(ways, order, calls=calls, seconds=options.seconds, rounds=rounds)
        of_case = rows_of(case, times)
        rows += of_case
        if hvd.rank() == 0:
            print_rows(of_case)
            save(options.json, rows)
            for row in of_case:
                if "overhead_us" in row:
                    print(f"{'':37}  {row['who']:<28} {row['overhead_us']:12.1f} us over plain")


if __name__ == "__main__":
    main()
