"""The cost of an allreduce in a process set on one host, by its two implementations.

    mpirun -np 3 python benchmarks/process_sets.py

    direct     blocks in the slots of shared memory: the world and the first 15 sets
    pairwise   rings over the pipes between pairs of ranks: further sets
    world      all ranks, for comparison; the sets have all but the last, which is idle meanwhile

The three take turns, a call each. Printed are the median and the 10th to 90th percentile of a
blocking in-place sum of float32, in ms.
"""

from __future__ import annotations

import time

import numpy as np
from record import arguments, save
from turns import summary

import hororing.numpy as hvd
from hororing._requests.process_sets import register

DIRECT_SETS = 15  # kSlotSets in csrc/transport/shm/segment.h, minus the world


def seconds(tensor: np.ndarray, process_set: hvd.ProcessSet, name: str) -> float:
    begin = time.perf_counter()
    hvd.allreduce_(tensor, op=hvd.Max, name=name, process_set=process_set)
    return time.perf_counter() - begin


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=float, nargs="+", default=[0.0625, 1, 16, 64])
    options = parser.parse_args(argv)
    sizes, rounds = ([0.0625], 1) if options.quick else (options.mib, options.rounds)
    hvd.init()
    if hvd.size() < 3:
        raise SystemExit("this benchmark needs at least 3 ranks: mpirun -np 3 ...")
    members = range(hvd.size() - 1)
    direct = register(members, internal=True)
    for _ in range(DIRECT_SETS - 1):
        register([0], internal=True)
    ways = {
        "direct": direct,
        "pairwise": register(members, internal=True),
        "world": hvd.global_process_set,
    }
    rows = []
    for mib in sizes:
        tensor = np.ones(int(mib * 2**18), np.float32)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds + 1):
            for way, process_set in ways.items():
                hvd.barrier()
                if process_set.included():
                    times[way].append(seconds(tensor, process_set, way))
        if hvd.rank() == 0:
            for way, samples in times.items():
                row = {"measure": "process set", "case": f"{mib:g} MiB", "who": f"hororing {way}"}
                row |= summary(np.array(samples[1:]))  # without the first
                rows.append(row)
                low, middle, high = (row[key] / 1e3 for key in ("p10_us", "median_us", "p90_us"))
                print(f"{mib:8g} MiB  {way:9} {middle:9.3f} ms  {low:9.3f} .. {high:9.3f}")
    if hvd.rank() == 0:
        save(options.json, rows)
    hvd.barrier()


if __name__ == "__main__":
    main()
