"""PyTorch steps between hosts with slow links, by compression, against steps that send nothing.

    export OMPI_MCA_btl=self,sm,tcp OMPI_MCA_pml=ob1 OMPI_MCA_osc=^ucx
    tests/hosts.sh 1,1 -r 200mbit mpirun python benchmarks/compression_network.py --json FILE

    alone          no communication: the baseline
    none .. auto   DistributedOptimizer(compression=); auto decides before timing starts
    DDP ...        DistributedDataParallel over gloo: plain, and with torch's PowerSGD hook (rank 4)

Two models learn to classify ten clusters. `dense` has four layers of 1024 x 1024 and 1024 rows per
batch; its step waits for the network. `conv` has four convolutions and 64 images per batch; it
computes much for small gradients. Each rank computes with one thread. All variants take turns in
the same processes, a series of steps each (turns.py).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import peers
import torch
import torch.distributed as dist
from record import Row, arguments, print_rows, save
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from turns import Way, summary, take_turns

import hororing.torch as hvd

DECIDED = 60  # steps: auto has chosen by then


def dense() -> tuple[nn.Module, tuple[int, ...]]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(1024, 10)), (1024, 1024)


def conv() -> tuple[nn.Module, tuple[int, ...]]:
    sizes = [3, 32, 32, 64, 64]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(*layers, *pooled), (64, 3, 32, 32)


MODELS = {"dense": dense, "conv": conv}
METHODS = {
    "none": hvd.Compression.none,
    "fp16": hvd.Compression.fp16,
    "int8": hvd.Compression.int8,
    "powersgd": hvd.Compression.powersgd(rank=4),
    "topk": hvd.Compression.topk(ratio=0.01),
    "auto": hvd.Compression.auto,
}


def training(way: str, make: Callable[[], tuple[nn.Module, tuple[int, ...]]]) -> tuple[Way, Any]:
    """Return a function that runs one step of a fresh model, and the optimizer."""
    torch.manual_seed(1)
    model, shape = make()
    optimizer: Any = torch.optim.SGD(model.parameters(), 1e-3)
    if way in METHODS:
        named = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(optimizer, named, compression=METHODS[way])
    elif way != "alone":
        # One bucket: gloo runs the callbacks of several in any order, and then mixes up their data.
        whole = 64 if "PowerSGD" in way else None
        model = DistributedDataParallel(model, bucket_cap_mb=whole)
        if "PowerSGD" in way:
            state = powerSGD_hook.PowerSGDState(
                dist.group.WORLD, matrix_approximation_rank=4, start_powerSGD_iter=2
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    centers = torch.randn(10, *shape[1:], generator=torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(3 + hvd.rank())

    def step() -> None:
        optimizer.zero_grad()
        labels = torch.randint(10, shape[:1], generator=generator)
        x = centers[labels] + torch.randn(shape, generator=generator)
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step, optimizer


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    hvd.init()
    peers.join_gloo()
    order = random.Random(options.seed)
    rows: list[Row] = []
    for case, make in MODELS.items():
        ways = {}
        for way in ("alone", *METHODS, "DDP gloo", "DDP gloo PowerSGD"):
            ways[way], _ = training(way, make)
            for _ in range(DECIDED if way == "auto" and not options.quick else 3):
                ways[way]()
        if hvd.rank() == 0:
            print(case, hvd.statistics()["compression"])
        rounds = (1, 1) if options.quick else (7, 9)
        times = take_turns(ways, order, calls=2, seconds=options.seconds, rounds=rounds)
        of_case = [
            {"measure": "compression", "case": case, "who": who, **summary(series)}
            for who, series in times.items()
        ]
        rows += of_case
        if hvd.rank() == 0:
            print_rows(of_case, "alone")
            save(options.json, rows)


if __name__ == "__main__":
    main()
