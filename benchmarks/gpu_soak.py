"""Whether memory grows while ranks reduce, gather, exchange, and form process sets on GPUs.

    hororun -np 2 python benchmarks/gpu_soak.py --seconds 8     for each of the four

HORORING_DYNAMIC_PROCESS_SETS must be set. The first quarter of the time, and at least 20 steps, are
a warm-up; at least 20 steps follow. The exit code is 1 if a rank's host memory, or the used memory
of its GPU, has grown by more than 4 MiB and 16 KiB per step since. With FAKE_GPU (see
tests/fake_gpu), which keeps 4 KiB of each process set, there is no memory of a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_check import device_of_rank

import hororing.torch as hvd

MOST_MIB, MOST_MIB_PER_STEP = 4.0, 1 / 64


def gradients(step: int, device: torch.device) -> None:
    tensors = [torch.ones(1 << 12, device=device) for _ in range(20)]
    handles = [hvd.allreduce_async_(t, name=f"gradient.{i}") for i, t in enumerate(tensors)]
    for handle in handles:
        hvd.synchronize(handle)


def gathered(step: int, device: torch.device) -> None:
    hvd.allgather(torch.ones(1 + step % 7 + hvd.rank(), 300, device=device), name="gathered")


def exchanged(step: int, device: torch.device) -> None:
    hvd.alltoall(torch.ones(hvd.size() * (1 + step % 5), 300, device=device), name="exchanged")


def sets(step: int, device: torch.device) -> None:
    formed = hvd.add_process_set([0])
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(300, device=device), name="of a set", process_set=formed)
    hvd.remove_process_set(formed)


def used_mib(device: torch.device) -> dict[str, float]:
    """Of this process's host memory, by what it maps, and of the device."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
    used = {what.removeprefix("Rss").lower(): value / 1024 for what, value in kib.items()}
    used["GPU"] = 0.0
    if device.type == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        used["GPU"] = (total - free) / 2**20
    return used


def soak(work: Callable[[int, torch.device], None], seconds: float, device: torch.device) -> bool:
    """Work until the slowest rank has done so for `seconds`; return whether memory has grown."""
    begin = time.monotonic()
    step = first = 0
    before: dict[str, float] = {}
    while True:
        work(step, device)
        step += 1
        if step % 5 != 0:
            continue
        passed = torch.tensor(time.monotonic() - begin)
        passed_s = hvd.allreduce(passed, op=hvd.Min, name="passed").item()
        if not before and passed_s > seconds / 4 and step >= 20:
            before, first = used_mib(device), step
        if before and passed_s > seconds and step >= first + 20:
            break
    grown = {what: now - before[what] for what, now in used_mib(device).items()}
    text = ", ".join(f"{what} {mib:+.1f}" for what, mib in grown.items())
    print(f"rank {hvd.rank()}: {work.__name__}, {step - first} steps, MiB: {text}", flush=True)
    gpu = grown.pop("GPU")
    return max(sum(grown.values()), gpu) > MOST_MIB + MOST_MIB_PER_STEP * (step - first)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    hvd.init()
    device = device_of_rank()
    grown = [soak(work, options.seconds, device) for work in (gradients, gathered, exchanged, sets)]
    hvd.shutdown()
    return 1 if any(grown) else 0


if __name__ == "__main__":
    sys.exit(main())
