"""`hororing predict` against steps: from 2 ranks on one host to 4 ranks, and to 2 and 4 hosts.

    python benchmarks/predicted.py                   root, 3 minutes (tests/hosts.sh)

Four models compute once in this process: when each gradient is ready, in a dozen steps. The ranks
of all jobs then train models with the same parameters and hooks, but sleep until each gradient is
ready instead of computing, in steps drawn by each rank for itself: so four ranks have a core each,
as predictions assume, on a machine with two. The job of 2 ranks is recorded; all others are
predicted from its timeline and measured, in the same sitting.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
# Of the emulated hosts: a message over a veth pair and a bridge. Without a limit, a core moves the
# bytes: what one moves over such a link.
LATENCY_S, UNLIMITED = 50e-6, 20e9
NETWORKS = {"200mbit": 200e6, "1gbit": 1e9, "off": UNLIMITED}
NAMES = ["conv", "200 layers", "transformer", "mlp"]
RECORDED, WARM_UP, STEPS, CALIBRATED = 60, 3, 15, 12


def models() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """By name: a model and a batch."""
    sys.path.insert(0, str(ROOT / "examples"))
    import torch_step
    from torch_masked_language_model import Bert  # type: ignore[import-not-found]

    conv, shape = torch_step.convolutional()
    deep, width = torch_step.layers_200()
    mlp = [part for _ in range(3) for part in (nn.Linear(784, 784), nn.ReLU())]
    made = [
        (conv, torch.randn(32, *shape)),
        (deep, torch.randn(256, *width)),
        (Bert(128, 4, 4, 64), torch.randint(256, (16, 64))),
        (nn.Sequential(*mlp, nn.Linear(784, 10)), torch.randn(256, 784)),
    ]
    return dict(zip(NAMES, made, strict=True))


def calibrate(folder: str, chosen: list[str]) -> None:
    """Write when each gradient is ready in steps of each model, computing alone on a core."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    for name, (model, batch) in models().items():
        if name not in chosen:
            continue
        parameters = list(model.parameters())
        ready: dict[int, float] = {}
        for index, each in enumerate(parameters):
            note = functools.partial(ready.__setitem__, index)
            each.register_post_accumulate_grad_hook(lambda _, note=note: note(time.thread_time()))  # type: ignore[no-untyped-call]
        rows = []
        for _ in range(CALIBRATED + 2):
            model.zero_grad()
            began = time.thread_time()  # of the processor: others may have the core
            model(batch).square().mean().backward()
            rows.append([ready[index] - began for index in range(len(parameters))])
        shapes = json.dumps([list(each.shape) for each in parameters])
        np.savez(f"{folder}/{name}.npz", ready=rows[2:], shapes=shapes)


class Ready(torch.autograd.Function):
    """Backward sleeps until the gradient of one parameter is ready."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, model: Paced, index: int, _: Any) -> torch.Tensor:
        ctx.model, ctx.index = model, index
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        model, index = ctx.model, ctx.index
        left = model.began + model.ready[model.step, index] - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return grad, None, None, torch.zeros_like(model.weights[index])


class Paced(nn.Module):
    """Has the gradients of a model at its times."""

    def __init__(self, path: Path, seed: int) -> None:
        super().__init__()
        with np.load(path) as read:
            self.ready = read["ready"]
            shapes = json.loads(str(read["shapes"]))
        self.order = np.argsort(np.median(self.ready, axis=0))
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(each)) for each in shapes])
        self.draw, self.step, self.began = np.random.default_rng(seed), 0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.began, self.step = time.perf_counter(), int(self.draw.integers(len(self.ready)))
        for index in self.order[::-1]:
            x = Ready.apply(x, self, int(index), self.weights[int(index)])  # type: ignore[no-untyped-call]
        return x


def train(folder: Path, record: bool) -> None:
    """The script of a rank: prints the median step of each model."""
    import hororing.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    found = {}
    for path in sorted(folder.glob("*.npz")):
        model = Paced(path, hvd.rank())
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(path.stem)
        )
        ends = []
        for step in range(RECORDED if record else WARM_UP + STEPS):
            if record and step == WARM_UP:
                hvd.barrier()
                hvd.start_timeline(folder / f"{path.stem}.json")
                hvd.barrier()
            optimizer.zero_grad()
            model(torch.zeros(1, requires_grad=True)).sum().backward()
            optimizer.step()
            ends.append(time.perf_counter())
        hvd.barrier()
        if record:
            hvd.stop_timeline()
        found[path.stem] = statistics.median(np.diff(ends[WARM_UP:]).tolist())
    if hvd.rank() == 0:
        print(json.dumps(found), flush=True)
    hvd.shutdown()


def job(folder: str, layout: str, rate: str, *options: str) -> dict[str, float]:
    """Run the script on emulated hosts; seconds of a step by model."""
    command = [
        str(ROOT / "tests/hosts.sh"), layout, *(["-r", rate] if rate != "off" else []), "mpirun",
        "-x", "HORORING_TRANSPORT=tcp", sys.executable, __file__, "--train", folder, *options,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=400)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--record", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--rates", nargs="+", default=[*NETWORKS], choices=NETWORKS)
    chosen = parser.parse_args()
    if chosen.train:
        train(Path(chosen.train), chosen.record)
        return
    from hororing.toolkit.predict import predict, read_profile

    off = []
    with tempfile.TemporaryDirectory() as folder:
        calibrate(folder, chosen.models)
        recorded = job(folder, "2", "off", "--record")
        profiles = {name: read_profile(f"{folder}/{name}.json") for name in recorded}
        for name, seconds in recorded.items():
            print(f"{name:<12} recorded {seconds * 1e3:.1f} ms")
        cases = [("4", "off", None), *((hosts, rate, NETWORKS[rate]) for rate in chosen.rates
                                       for hosts in ("1,1", "1,1,1,1"))]  # fmt: skip
        for layout, rate, bits_per_s in cases:
            measured = job(folder, layout, rate)
            for name, seconds in measured.items():
                ranks = sum(map(int, layout.split(",")))
                per_host = None if bits_per_s is None else 1
                point = predict(
                    profiles[name], [ranks], bits_per_s=bits_per_s, latency_s=LATENCY_S,
                    ranks_per_host=per_host,
                ).points[0]  # fmt: skip
                off.append(point.step_s / seconds - 1)
                print(
                    f"{name:<12} {layout:<8} {rate:<8} measured {seconds * 1e3:7.1f} ms, "
                    f"predicted {point.step_s * 1e3:7.1f} ({off[-1]:+.0%})",
                    flush=True,
                )
    sizes = sorted(map(abs, off))
    print(f"off by {statistics.median(sizes):.0%} in the median, {sizes[-1]:.0%} at worst; load "
          f"{os.getloadavg()[0]:.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
