"""In-place float32 sums of 4 B to 256 MB: hororing against MPI_Allreduce and torch's gloo.

    mpirun -np 2 python benchmarks/allreduce.py --json result.json

All contestants run in the same processes on the same memory. For every size they take turns, in
random order, with short series of calls, so that what else the machine does hits all of them
alike. A series begins on all ranks at one instant of their common clock, after a call that does
not count; before it they sleep, since a barrier that spins would take the cores away from those
who work in threads. A call's time is that of the series by its length, on the slowest rank. `algbw`
is bytes / time and `busbw` is algbw * 2 (N - 1) / N, as in nccl-tests. Only ratios mean anything
on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

import hororing.torch as hvd

SIZES = [4, 256, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20,
         256 << 20]  # fmt: skip


def contestants() -> dict[str, Callable[[torch.Tensor], object]]:
    """Each sums its argument over all ranks, in place, and returns when that is done."""
    rendezvous = MPI.COMM_WORLD.bcast(
        tempfile.mktemp(prefix="hororing-bench-") if hvd.rank() == 0 else None
    )
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=hvd.rank(), world_size=hvd.size()
    )
    return {
        "hororing": lambda x: hvd.allreduce_(x, op=hvd.Sum, name="benchmark"),
        "mpi": lambda x: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x.numpy()),
        "gloo": dist.all_reduce,
    }


def series_length(nbytes: int) -> int:
    """Calls of about two milliseconds in all, if a call takes 20 us and a byte 0.2 ns."""
    return max(1, min(50, int(2e-3 / (20e-6 + 0.2e-9 * nbytes))))


def start_together(run: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    """Wait, asleep, for all ranks; return at the same instant everywhere, with warm caches."""
    everybody = MPI.COMM_WORLD.Ibarrier()
    while not everybody.Test():
        time.sleep(20e-6)
    run(tensor)
    start = MPI.COMM_WORLD.bcast(time.perf_counter() + 100e-6)
    while time.perf_counter() < start:
        pass
    return start


def measure(nbytes: int, runs: dict[str, Callable], order: random.Random, seconds: float) -> dict:
    tensor = torch.zeros(max(1, nbytes // 4), dtype=torch.float32)
    tensor.fill_(0.0)
    times: dict[str, list[float]] = {name: [] for name in runs}
    length = series_length(nbytes)
    repetition, count = -1, 1  # the first round warms up, and says how many fit the time
    while repetition < count:
        round_begin = time.perf_counter()
        names = list(runs)
        order.shuffle(names)
        for name in names:
            run = runs[name]
            begin = start_together(run, tensor)
            for _ in range(length):
                run(tensor)
            elapsed = time.perf_counter() - begin
            if repetition >= 0:
                times[name].append(elapsed / length)
        if repetition < 0:
            fitting = len(runs) * seconds / (time.perf_counter() - round_begin)
            count = MPI.COMM_WORLD.bcast(max(9, min(200, int(fitting))))
        repetition += 1
    slowest = {
        name: np.max(MPI.COMM_WORLD.allgather(np.array(series)), axis=0)
        for name, series in times.items()
    }
    return {name: summary(nbytes, series) for name, series in slowest.items()}


def summary(nbytes: int, seconds: np.ndarray) -> dict:
    median = statistics.median(seconds)
    size = hvd.size()
    return {
        "series": len(seconds),
        "calls_per_series": series_length(nbytes),
        "median_us": median * 1e6,
        "p10_us": float(np.percentile(seconds, 10)) * 1e6,
        "p90_us": float(np.percentile(seconds, 90)) * 1e6,
        "algbw_GBps": nbytes / median / 1e9,
        "busbw_GBps": nbytes / median / 1e9 * 2 * (size - 1) / size,
    }


def human(nbytes: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def print_row(nbytes: int, results: dict) -> None:
    ours = results["hororing"]["median_us"]
    for name, result in results.items():
        print(
            f"{human(nbytes):>8}  {name:<9} {result['median_us']:>11.1f} "
            f"{result['p10_us']:>11.1f} {result['p90_us']:>11.1f} {result['algbw_GBps']:>7.2f} "
            f"{result['busbw_GBps']:>7.2f} {result['median_us'] / ours:>9.2f}x",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--max-bytes", type=int, default=SIZES[-1], help="largest size")
    parser.add_argument("--seconds", type=float, default=2.0, help="time per size and contestant")
    parser.add_argument("--seed", type=int, default=1, help="of the order of repetitions")
    args = parser.parse_args()

    torch.set_num_threads(1)
    hvd.init()
    runs = contestants()
    order = random.Random(args.seed)
    if hvd.rank() == 0:
        mpi = MPI.Get_library_version().split(",")[0]
        print(f"{hvd.size()} ranks on {os.cpu_count()} cores, {mpi}, torch {torch.__version__}")
        print(f"{'size':>8}  {'':<9} {'median us':>11} {'p10':>11} {'p90':>11} {'algbw':>7} "
              f"{'busbw':>7} {'to ours':>10}")  # fmt: skip
    table = {}
    for nbytes in SIZES:
        if nbytes > args.max_bytes:
            break
        table[nbytes] = measure(nbytes, runs, order, args.seconds)
        if hvd.rank() == 0:
            print_row(nbytes, table[nbytes])
    if hvd.rank() == 0 and args.json:
        with open(args.json, "w") as file:
            json.dump(
                {
                    "command": " ".join(sys.argv),
                    "ranks": hvd.size(),
                    "cores": os.cpu_count(),
                    "machine": platform.processor() or platform.machine(),
                    "mpi": MPI.Get_library_version().split(",")[0],
                    "torch": torch.__version__,
                    "sizes": table,
                },
                file,
                indent=1,
            )
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
