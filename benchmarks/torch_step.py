"""The overhead of communication in a PyTorch training step, on one host.

    mpirun -np 2 python benchmarks/torch_step.py
    mpirun -np 2 python benchmarks/torch_step.py --ways hororing weighted

    plain          no communication: the baseline
    hororing       DistributedOptimizer with its defaults
    DDP            DistributedDataParallel with gloo
    DDP's views    the same with gradient_as_bucket_view=True
    Horovod        Horovod's DistributedOptimizer, with a cycle of 1 ms and of 0.1 ms
    MPI, each      one blocking MPI_Allreduce per gradient after backward, and the division
    weighted       hororing with new weights of the ranks in each step (only with --ways)

All use the same model and batches, in the same processes, with one thread of compute per rank. The
overhead is the median, over rounds, of the difference to plain's series of the same round.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import horovod_peer
import numpy as np
import peers
import torch
from mpi4py import MPI
from record import Row, arguments, print_rows, save
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from turns import summary, take_turns

import hororing.torch as hvd

BATCH = 32


def layers_200() -> tuple[nn.Module, tuple[int, ...]]:
    """200 small layers: 402 gradients, 3.3 MB."""
    layers = [part for _ in range(200) for part in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 10)), (64,)


def convolutional() -> tuple[nn.Module, tuple[int, ...]]:
    """A convolutional model of 11 MB."""
    layers: list[nn.Module] = []
    inputs = 3
    for filters in (32, 64, 128, 256):
        for _ in range(2):
            layers += [
                nn.Conv2d(inputs, filters, 3, padding=1, bias=False),
                nn.BatchNorm2d(filters),
                nn.ReLU(),
            ]
            inputs = filters
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(1024, 1536), nn.ReLU(), nn.Linear(1536, 10)]
    return nn.Sequential(*layers), (3, 32, 32)


# Name: the model, and the number of steps in a series.
MODELS = {"200 layers": (layers_200, 5), "convolutional": (convolutional, 2)}


def training(
    way: str,
    make: Callable[[], tuple[nn.Module, tuple[int, ...]]],
    horovod: horovod_peer.Horovod | None,
) -> Callable[[], None]:
    """Return a function that runs one step of a fresh model."""
    torch.manual_seed(1)
    model, shape = make()
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, 0.001)
    if way in ("hororing", "weighted"):
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(prefix=way))
    elif horovod is not None:
        optimizer = horovod.optimizer(optimizer, model.named_parameters(prefix=way))
    elif way.startswith("DDP"):
        model = DistributedDataParallel(model, gradient_as_bucket_view=way == "DDP's views")
    x = torch.randn(BATCH, *shape)
    y = torch.randint(0, 10, (BATCH,))
    loss_of = nn.CrossEntropyLoss()

    weights = itertools.cycle([hvd.rank() + number for number in (1, 5, 3)])

    def step() -> None:
        if way == "weighted":
            optimizer.weight = next(weights)  # type: ignore[attr-defined]
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        if way == f"{peers.mpi_name()}, each":
            for parameter in parameters:
                MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, parameter.grad.numpy())
                parameter.grad /= hvd.size()
        optimizer.step()

    return step


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", help="these, and plain, instead of all but weighted")
    horovod_peer.add_option(parser)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    hvd.init()
    horovods = horovod_peer.found(options.horovod)
    order = random.Random(options.seed)
    names = ["plain", "hororing", "DDP", "DDP's views", f"{peers.mpi_name()}, each", *horovods]
    if options.ways:
        if unknown := {*options.ways} - {*names, "weighted"}:
            parser.error(f"unknown ways: {', '.join(sorted(unknown))}")
        names = ["plain", *(way for way in options.ways if way != "plain")]
    if any(way.startswith("DDP") for way in names):
        peers.join_gloo()
    rows: list[Row] = []
    for model in options.models[:1] if options.quick else options.models:
        make, steps = MODELS[model]
        times = take_turns(
            {way: training(way, make, horovods.get(way)) for way in names},
            order,
            calls=1 if options.quick else steps,
            seconds=4 * options.seconds,
            rounds=(1, 1) if options.quick else (7, 60),
            around={name: peer.awake for name, peer in horovods.items()},
        )
        case = []
        for who, series in times.items():
            over = (series - times["plain"]) * 1e6
            low, median, high = np.percentile(over, (10, 50, 90))
            case.append({
                "measure": "training step", "case": model, "who": who, **summary(series),
                "overhead_us": median, "overhead_p10_us": low, "overhead_p90_us": high,
            })  # fmt: skip
        rows += case
        if hvd.rank() == 0:
            print_rows(case)
            save(options.json, rows)
            for row in case:
                print(f"{'':37}  {row['who']:<28} {row['overhead_us']:12.1f} us over plain")


if __name__ == "__main__":
    main()
