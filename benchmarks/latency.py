"""What a small blocking sum costs, and where: microseconds per call, called back to back.

    mpirun -np 2 python benchmarks/latency.py

    blocking   allreduce_: the caller does the engine's work while it waits (ADR 0012)
    handed     allreduce_async_, then synchronize: the engine's thread is woken for it
    submit     the part of `blocking` before it waits: checks, names, the call into the core

The three take turns in series of 200 calls. Medians and 10th to 90th percentile of all calls.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from record import arguments, save
from turns import summary

import hororing.torch as hvd
from hororing.torch.ops import verbs

CALLS = 200


def blocking(tensor: torch.Tensor) -> float:
    begin = time.perf_counter()
    hvd.allreduce_(tensor, op=hvd.Sum, name="benchmark")
    return time.perf_counter() - begin


def handed(tensor: torch.Tensor) -> float:
    begin = time.perf_counter()
    hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum, name="benchmark"))
    return time.perf_counter() - begin


def submit(tensor: torch.Tensor) -> float:
    begin = time.perf_counter()
    handle = verbs.reduce_async(
        "allreduce", [tensor], True, "benchmark", hvd.Sum, 1.0, 1.0, wait_follows=True
    )
    elapsed = time.perf_counter() - begin
    hvd.synchronize(handle)
    return elapsed


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--bytes", type=int, default=4, help="of float32")
    parser.add_argument("--series", type=int, default=20, help="of each kind")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    hvd.init()
    tensor = torch.zeros(max(1, args.bytes // 4))
    kinds = (blocking, handed, submit)
    times: dict[str, list[float]] = {kind.__name__: [] for kind in kinds}
    for number in range(-1, 1 if args.quick else args.series):  # the first series of each warms up
        for kind in kinds:
            series = [kind(tensor) for _ in range(CALLS)]
            if number >= 0:
                times[kind.__name__] += series
    if hvd.rank() == 0:
        rows = []
        for name, series in times.items():
            row = {"measure": "latency", "case": f"{args.bytes} B", "who": f"hororing {name}"}
            rows.append(row | summary(np.array(series)))
            text = "{who:<18} {median_us:7.1f} us   {p10_us:7.1f} .. {p90_us:7.1f}"
            print(text.format(**rows[-1]))
        save(args.json, rows)


if __name__ == "__main__":
    main()
