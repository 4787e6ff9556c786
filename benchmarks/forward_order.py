"""Steps of a net whose last layers are large, over slow wires: who waits for what.

    export OMPI_MCA_btl=self,sm,tcp OMPI_MCA_pml=ob1 OMPI_MCA_osc=^ucx
    tests/hosts.sh 1,1 -r 200mbit mpirun python benchmarks/forward_order.py --json result.json

    ordinary    step() waits for all gradients
    unordered   step_in_forward, all gradients of one priority
    ordered     step_in_forward, gradients in the order of the forward pass

take turns in the same processes, in random order. A turn is --steps steps; its time is that of the
slowest rank. Convolutions compute, fully connected layers travel, as in the VGG of old.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hororing
import hororing.torch as hvd

WAYS = ["ordinary", "unordered", "ordered"]


def network(width: int, layers: int) -> nn.Module:
    convolutions: list[nn.Module] = []
    channels = 3
    for wanted in (16, 32, 32, 32):
        convolutions += [nn.Conv2d(channels, wanted, 3, padding=1), nn.ReLU()]
        channels = wanted
    connected: list[nn.Module] = []
    inputs = channels * 16
    for _ in range(layers):
        connected += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(
        *convolutions, nn.AdaptiveAvgPool2d(4), nn.Flatten(), *connected, nn.Linear(inputs, 100)
    )


class Contestant:
    """One way, with a model of its own."""

    def __init__(self, way: str, args: argparse.Namespace) -> None:
        torch.manual_seed(1)
        self.model = network(args.width, args.layers)
        self.inputs = torch.randn(args.batch, 3, args.pixels, args.pixels)
        self.targets = torch.randint(100, (args.batch,))
        self.optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9),
            [(f"{way}.{name}", param) for name, param in self.model.named_parameters()],
            step_in_forward=None if way == "ordinary" else self.model,
        )
        self.steps(2)
        if way == "unordered":
            self.optimizer._reducer.prioritise({})
            self.steps(2)

    def forward_and_backward(self) -> None:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.inputs), self.targets)
        loss.backward()

    def steps(self, count: int) -> float:
        """Seconds of a step here, all of the last one included."""
        begin = time.perf_counter()
        for _ in range(count):
            self.forward_and_backward()
            self.optimizer.step()
        if hasattr(self.optimizer, "finish_step"):
            self.optimizer.finish_step()
        return (time.perf_counter() - begin) / count


def slowest(seconds: float) -> float:
    return float(hvd.allreduce(torch.tensor(seconds), op=hvd.Max, name="seconds"))


def compute_alone(args: argparse.Namespace) -> float:
    """Seconds of forward and backward without any reduction, on all ranks at once."""
    model = network(args.width, args.layers)
    inputs = torch.randn(args.batch, 3, args.pixels, args.pixels)
    targets = torch.randint(100, (args.batch,))
    times = []
    for _ in range(5):
        hvd.barrier()
        begin = time.perf_counter()
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        times.append(slowest(time.perf_counter() - begin))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6, help="fully connected ones")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--pixels", type=int, default=32)
    parser.add_argument("--network", default="", help="what the wire is, for the record")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    contestants = {way: Contestant(way, args) for way in WAYS}
    order = random.Random(7)  # the same on all ranks
    measured: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(args.turns):
        for way in order.sample(WAYS, len(WAYS)):
            hvd.barrier()
            measured[way].append(slowest(contestants[way].steps(args.steps)))
    alone = compute_alone(args)
    states = {way: contestants[way].model.state_dict() for way in WAYS}
    same_bits = all(
        torch.equal(states["ordered"][key], states["ordinary"][key]) for key in states["ordered"]
    )
    if hvd.rank() == 0:
        gradients = sum(p.nbytes for p in contestants["ordered"].model.parameters())
        result = {
            "ranks": hvd.size(),
            "hosts": hvd.cross_size(),
            "network": args.network,
            "machine": f"{platform.machine()}, {torch.get_num_threads()} thread per rank",
            "hororing": hororing.__version__,
            "torch": torch.__version__,
            "arguments": {key: getattr(args, key) for key in
                          ("steps", "turns", "width", "layers", "batch", "pixels")},
            "gradient_bytes": gradients,
            "compute_alone_ms": round(1e3 * alone, 1),
            "ordered_has_the_bits_of_ordinary": same_bits,
            "step_ms": {
                way: {
                    "median": round(1e3 * statistics.median(times), 1),
                    "least": round(1e3 * min(times), 1),
                    "most": round(1e3 * max(times), 1),
                }
                for way, times in measured.items()
            },
        }  # fmt: skip
        print(json.dumps(result, indent=2))
        if args.json:
            args.json.write_text(json.dumps(result, indent=2) + "\n")
    hvd.shutdown()


if __name__ == "__main__":
    main()
