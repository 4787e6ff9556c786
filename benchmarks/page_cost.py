"""What `hororing page` costs the ranks of a job: processor time of their steps with it and without.

    hororun -np 2 python benchmarks/page_cost.py             5 minutes

One page watches the job, and somebody looks at it. Both are stopped (SIGSTOP) in one turn of each
pair, in random order. A turn's figure is the processor time of a step (getrusage), the sum over the
ranks; other processes on the machine change it less than they change time. The processor time of
the page itself is told beside it: it delays the ranks if they leave no core idle.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import time
import urllib.request

import torch

import hororing.torch as hvd


def look(url: str) -> None:
    """Ask for the state once a second, like a browser."""
    port, token = url.partition("/?token=")[::2]
    asked = urllib.request.Request(f"{port}/state", headers={"Authorization": f"Bearer {token}"})
    while True:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            answer.read()
        time.sleep(1)


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Watched:
    """The page and who looks at it; on rank 0."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "hororing", "page", "--port", "0"]
        self.page = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.page.stderr is not None
        url = self.page.stderr.readline().split()[1]
        self.looker = subprocess.Popen([sys.executable, __file__, "--look", url])
        time.sleep(5)

    def send(self, number: signal.Signals) -> None:
        self.page.send_signal(number)
        self.looker.send_signal(number)

    def end(self) -> None:
        self.page.kill()
        self.looker.kill()


def turn(training: Training, seconds: float) -> float:
    """Processor time of a step, the sum over the ranks."""
    training.step()
    steps, end = 0, time.monotonic() + seconds
    before = resource.getrusage(resource.RUSAGE_SELF)
    while bool(hvd.broadcast_object(time.monotonic() < end)):
        for _ in range(10):
            training.step()
        steps += 10
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return sum(hvd.allgather_object(used)) / steps


class Training:
    """Steps of about 10 ms with 12 gradients."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        layers = [m for _ in range(6) for m in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
        self.model = torch.nn.Sequential(*layers)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.optimizer = hvd.DistributedOptimizer(optimizer, self.model.named_parameters())
        self.batch = torch.randn(256, 256)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=70)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--look", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.look:
        look(chosen.look)
    hvd.init()
    training = Training()
    watched = Watched() if hvd.rank() == 0 else None
    draw, ratios, page_s = random.Random(), [], 0.0
    for _ in range(chosen.pairs):
        found = {}
        for on in hvd.broadcast_object(draw.sample([True, False], 2)):
            if watched is not None:
                watched.send(signal.SIGCONT if on else signal.SIGSTOP)
                began = cpu_s(watched.page.pid)
            found[on] = turn(training, chosen.seconds)
            if watched is not None:
                page_s += cpu_s(watched.page.pid) - began
        ratios.append(found[True] / found[False])
    if watched is not None:
        watched.send(signal.SIGCONT)
        watched.end()
        means = sorted(statistics.fmean(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
        print(
            f"processor time of a step, with the page over without: median "
            f"{statistics.median(ratios):.4f}, mean {statistics.fmean(ratios):.4f} (95 %: "
            f"{means[50]:.4f} to {means[-51]:.4f}); {len(ratios)} pairs; the page uses "
            f"{page_s / chosen.pairs / chosen.seconds:.2%} of a core"
        )


if __name__ == "__main__":
    main()
