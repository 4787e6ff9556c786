"""The cost of steps as transactions in an elastic PyTorch job (ADR 52)::

    hororun -np 2 --min-np 2 python benchmarks/elastic_steps.py --floats 2000000

Blocks of ten steps take turns in the same processes: without transactions, with the exchange of
updates in `step()`, and also with `check_host_updates()` after each step. Printed are the ratio of
the medians, and the median and quartiles of the ratios of neighbouring blocks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import hororing.torch as hvd

WAYS = ("plain", "news", "news, mark")
WIDTH = 1000
STEPS = 10


def make(floats: int) -> tuple[torch.nn.Module, Any, Any]:
    """Return a model of dense layers, its optimizer, and its state."""
    layers = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.BatchNorm1d(WIDTH))
        for _ in range(floats // WIDTH**2)
    ]
    model = torch.nn.Sequential(*layers)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9), model.named_parameters()
    )
    sampler = hvd.elastic.ElasticSampler(range(100_000))
    return model, optimizer, hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=0)


def block(model: torch.nn.Module, optimizer: Any, state: Any, way: str) -> float:
    """Return the median time of a step, in s."""
    inputs = torch.randn(16, WIDTH)
    steps, optimizer._steps = optimizer._steps, None if way == "plain" else optimizer._steps
    times = []
    hvd.barrier()
    for _ in range(STEPS):
        begin = time.perf_counter()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.batch += 1
        if way == "news, mark":
            state.check_host_updates()
        times.append(time.perf_counter() - begin)
    optimizer._steps = steps
    return statistics.median(times[1:])


def main() -> None:
    """Measure; rank 0 prints the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--floats", type=int, default=1_000_000, help="size of the model")
    parser.add_argument("--blocks", type=int, default=60, help="number of blocks of each variant")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    model, optimizer, state = make(options.floats)
    times: dict[str, list[float]] = {way: [] for way in WAYS}

    @hvd.elastic.run
    def train(state: Any) -> None:
        for number in range(options.blocks):
            at = number % len(WAYS)
            for way in WAYS[at:] + WAYS[:at]:
                times[way].append(block(model, optimizer, state, way))

    train(state)
    if hvd.rank() == 0:
        plain = statistics.median(times["plain"])
        print(f"{hvd.size()} ranks, {options.floats:,} floats: a step takes {1e3 * plain:.2f} ms")
        for way in WAYS[1:]:
            ratio = statistics.median(times[way]) / plain
            pairs = sorted(b / a for a, b in zip(times["plain"], times[way], strict=True))
            low, middle, high = statistics.quantiles(pairs, n=4)
            print(f"  {way:11} {ratio:.3f}; paired {middle:.3f} ({low:.3f} .. {high:.3f})")


if __name__ == "__main__":
    main()
