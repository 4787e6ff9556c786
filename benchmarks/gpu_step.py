"""Times a training step on GPUs: plain torch, hororing, DDP.

    python benchmarks/gpu_step.py --json step.json
    hororun -np 2 python benchmarks/gpu_step.py

The model is like ResNet-50: 25 million parameters, 161 tensors with gradients. The variants take
turns; the figures are medians and deciles of steps, each followed by a synchronization of the
device. DistributedOptimizer reduces nothing with one rank; here it does what it does with several,
as DDP does: hooks, fusion, NCCL. DDP is measured with its defaults, and with
gradient_as_bucket_view, which saves a copy. If ranks share a GPU and HORORING_GPU is not nccl, DDP
uses gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_check import circumstances, device_of_rank
from torch import nn

import hororing.torch as hvd
from hororing._adapters.optimizer_options import Reduction


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside the identity (He et al. 2016, doi:10.1109/CVPR.2016.90)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.beside: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.beside = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.beside(x))


def resnet(blocks: tuple[int, ...], width: int) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    inputs = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Bottleneck(inputs, width << stage, stride))
            inputs = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


WAYS = ("plain", "hororing", "DDP", "DDP, bucket view")


def start_ddp() -> None:
    by_nccl = torch.cuda.is_available() and (
        hvd.local_size() <= torch.cuda.device_count()
        or (os.environ.get("HORORING_GPU") == "nccl" and torch.cuda.nccl.version() >= (2, 30))
    )  # torch's own NCCL, which may be older than hororing's
    torch.distributed.init_process_group(
        "nccl" if by_nccl else "gloo",
        init_method=f"tcp://127.0.0.1:{os.environ.get('DDP_PORT', '29517')}",
        rank=hvd.rank(),
        world_size=hvd.size(),
    )


def step_of(who: str, device: torch.device, quick: bool) -> Callable[[], None]:
    torch.manual_seed(1)
    model = (resnet((1, 1), 8) if quick else resnet((3, 4, 6, 3), 64)).to(device)
    batch, pixels = (2, 32) if quick else (64, 224)
    images = torch.randn(batch, 3, pixels, pixels, device=device)
    labels = torch.randint(0, 1000, (batch,), device=device)
    called = model
    if who.startswith("DDP"):
        called = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=who.endswith("view")
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if who == "hororing":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=not quick):
            loss = nn.functional.cross_entropy(called(images), labels)
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true", help="a small model: only that it runs")
    parser.add_argument("--rounds", type=int, default=8, help="of 10 steps for each way")
    options = parser.parse_args()
    hvd.init()
    device = device_of_rank()
    start_ddp()
    Reduction.reduces = property(lambda _: True)  # also alone: see above
    steps = {way: step_of(way, device, options.quick) for way in WAYS}
    times: dict[str, list[float]] = {who: [] for who in steps}
    before = hvd.statistics()
    taken = 0
    for turn in range((1 if options.quick else options.rounds) + 1):
        for who, step in steps.items():
            for _ in range(2 if options.quick else 10):
                begin = time.perf_counter()
                step()
                taken += who == "hororing"
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if turn > 0:
                    times[who].append(1e3 * (time.perf_counter() - begin))
    after = hvd.statistics()
    reduced = {
        what: (after[what] - before[what]) / taken for what in ("tensors", "bytes", "batches")
    }
    rows: dict[str, dict[str, float]] = {}
    for who, series in times.items():
        deciles = statistics.quantiles(series, n=10, method="inclusive")
        median = statistics.median(series)
        rows[who] = {"median_ms": median, "p10_ms": deciles[0], "p90_ms": deciles[-1]}
    for who, row in rows.items():
        row["times_plain"] = row["median_ms"] / rows["plain"]["median_ms"]
        if hvd.rank() == 0:
            print(f"{who:<18} {row['median_ms']:8.2f} ms ({row['p10_ms']:.2f} to "
                  f"{row['p90_ms']:.2f})  {row['times_plain']:.3f} of plain")  # fmt: skip
    if hvd.rank() == 0:
        print(f"{torch.distributed.get_backend()}; hororing reduces in each step:", reduced)
    if options.json and hvd.rank() == 0:
        report = {
            "circumstances": circumstances(), "ranks": hvd.size(), "reduced_per_step": reduced,
            "ddp": torch.distributed.get_backend(), "steps": rows,
        }  # fmt: skip
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    torch.distributed.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
