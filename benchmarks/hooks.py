"""The overhead of communication in a PyTorch training step, on one host.

    mpirun -np 2 python benchmarks/hooks.py --model tiny

Variants, with the same model and batches, in the same processes:

    plain            no communication: the baseline
    hororing         DistributedOptimizer
    ddp              DistributedDataParallel over gloo, default buckets
    ddp_views        the same with gradient_as_bucket_view=True
    horovod          Horovod's DistributedOptimizer, if installed, with its default cycle of 1 ms
    horovod_quick    the same with a cycle of 0.1 ms

Models: `tiny` has 1,000 parameters of 16 numbers, so that its overhead is nearly all hooks,
submission and completion; `linears` has 200 small layers (400 parameters, 3.3 MB); `mlp` has
100 MiB.

The variants take turns in random order, a series of steps each. Ranks sleep before a series and
begin it together; its time is that of the slowest rank. Printed are, in ms per step, the median and
the 10th to 90th percentile of all series, and the same of the difference to plain's series of the
same round. The last figure is the difference in processor time of all threads of the process, which
is more reliable than wall time on a shared machine.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext

import horovod_peer
import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from record import command
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hororing.torch as hvd

BATCH = 32


class Tiny(nn.Module):
    """A model with as little computation per parameter as possible."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList(torch.ones(16) for _ in range(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for factor in self.factors:
            x = x * factor
        return x


def linears() -> nn.Module:
    layers = [layer for _ in range(200) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers)


def mlp() -> nn.Module:
    layers = [layer for _ in range(25) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "tiny": (Tiny, (16,), 5),  # function that makes it, shape of its input, steps in a series
    "linears": (linears, (BATCH, 64), 5),
    "mlp": (mlp, (BATCH, 1024), 1),
}

Step = Callable[[], None]
Horovods = dict[str, horovod_peer.Horovod]  # by variant


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    return step


def ways(
    model: nn.Module, batch: torch.Tensor, chosen: list[str], horovods: Horovods
) -> dict[str, Step]:
    """Return the step of each variant, on a copy of `model`."""
    made = {}
    for way in chosen:
        twin = copy.deepcopy(model)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(twin.parameters(), lr=1e-9)
        module: nn.Module = twin
        if way == "hororing":
            optimizer = hvd.DistributedOptimizer(optimizer, twin.named_parameters())
        elif way in horovods:
            optimizer = horovods[way].optimizer(optimizer, twin.named_parameters())
        elif way.startswith("ddp"):
            module = DistributedDataParallel(twin, gradient_as_bucket_view=way == "ddp_views")
        made[way] = step_of(module, optimizer, batch)
    return made


HOROVODS = {"horovod": "1", "horovod_quick": "0.1"}  # cycle times, in ms
WAYS = ["plain", "hororing", "ddp", "ddp_views", *HOROVODS]


def start_together() -> None:
    """Sleep until all ranks are here; return at the same instant on all of them."""
    horovod_peer.wait_asleep()
    start = MPI.COMM_WORLD.bcast(time.perf_counter() + 100e-6)
    while time.perf_counter() < start:
        pass


def measure(
    steps: dict[str, Step], length: int, rounds: int, horovods: Horovods
) -> dict[str, np.ndarray]:
    """Return wall and processor seconds per step of each series, on the slowest rank."""
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in steps}
    order = random.Random(1)
    for number in range(-3, rounds):  # the first rounds warm up
        names = list(steps)
        order.shuffle(names)
        for way in names:
            with horovods[way].awake() if way in horovods else nullcontext():
                if way in horovods:  # makes its tensors known again
                    steps[way]()
                start_together()
                begin, cpu_begin = time.perf_counter(), time.process_time()
                for _ in range(length):
                    steps[way]()
                elapsed, cpu = time.perf_counter() - begin, time.process_time() - cpu_begin
            if number >= 0:
                times[way].append((elapsed / length, cpu / length))
    return {
        way: np.max(MPI.COMM_WORLD.allgather(np.array(series).T), axis=0)
        for way, series in times.items()
    }


def spread(series: np.ndarray) -> dict[str, float]:
    low, median, high = np.percentile(series, [10, 50, 90])
    return {"median": median, "p10": low, "p90": high}


def shown(series: np.ndarray) -> str:
    return "{median:7.2f} ({p10:.2f} .. {p90:.2f})".format(**spread(series))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", help="write all figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hvd.init()
    rendezvous = MPI.COMM_WORLD.bcast(tempfile.mktemp(prefix="hororing-bench-"))
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=hvd.rank(), world_size=hvd.size()
    )
    make, shape, length = MODELS[args.model]
    model = make()
    found = horovod_peer.found([HOROVODS[way] for way in args.ways if way in HOROVODS])
    names = {way: horovod_peer.NAMES[cycle_ms] for way, cycle_ms in HOROVODS.items()}
    horovods = {way: found[name] for way, name in names.items() if name in found}
    chosen = [w for w in dict.fromkeys(["plain", *args.ways]) if w in horovods or w not in names]
    steps = ways(model, torch.ones(shape), chosen, horovods)
    times = measure(steps, length, args.rounds, horovods)
    count = len(list(model.parameters()))
    if hvd.rank() == 0:
        print(f"{args.model}, {count} parameters, {hvd.size()} ranks, ms per step")
        result = {}
        for way, series in times.items():
            (own, _), (over, cpu_over) = series * 1e3, (series - times["plain"]) * 1e3
            result[way] = {"step_ms": spread(own), "over_plain_ms": spread(over),
                           "cpu_over_plain_ms": spread(cpu_over)}  # fmt: skip
            print(f"  {way:16} {shown(own)}  over plain {shown(over)}  processor {shown(cpu_over)}"
                  f"  {np.median(cpu_over) * 1e3 / count:6.2f} us per parameter")  # fmt: skip
        if args.json:
            with open(args.json, "w") as file:
                json.dump({"command": command(), "ranks": hvd.size(), "model": args.model,
                           "torch": torch.__version__, "ways": result}, file, indent=1)  # fmt: skip
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
