"""Latency of a small blocking sum, by caller: microseconds per call, called back to back.

    mpirun -np 2 python benchmarks/latency.py

    torch      allreduce_ of a tensor
    NumPy      allreduce_ of an array
    MPI        in-place MPI_Allreduce of that array through mpi4py; and of the tensor's .numpy()
    handed     allreduce_async_ of a tensor, then synchronize: this wakes the engine's thread

They take turns in series of 200 calls. Printed are the median and the 10th to 90th percentile of
all calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import peers
import torch
from mpi4py import MPI
from record import arguments, save
from turns import summary

import hororing.numpy
import hororing.torch as hvd

CALLS = 200


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--bytes", type=int, default=4, help="of float32")
    parser.add_argument("--series", type=int, default=20, help="of each kind")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    hvd.init()
    tensor = torch.zeros(max(1, args.bytes // 4))
    array = np.zeros(tensor.shape, np.float32)
    ways: dict[str, Callable[[], object]] = {
        "hororing torch": lambda: hvd.allreduce_(tensor, op=hvd.Sum, name="benchmark"),
        "hororing NumPy": lambda: hororing.numpy.allreduce_(array, op=hvd.Sum, name="benchmark"),
        peers.mpi_name(): lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array),
        f"{peers.mpi_name()}, tensor": lambda: MPI.COMM_WORLD.Allreduce(
            MPI.IN_PLACE, tensor.numpy()
        ),
        "hororing handed": lambda: hvd.synchronize(
            hvd.allreduce_async_(tensor, op=hvd.Sum, name="benchmark")
        ),
    }
    times: dict[str, list[float]] = {who: [] for who in ways}
    for number in range(-1, 1 if args.quick else args.series):  # the first series of each warms up
        for who, way in ways.items():
            series = [timed(way) for _ in range(CALLS)]
            if number >= 0:
                times[who] += series
    if hvd.rank() == 0:
        rows = []
        for who, series in times.items():
            row = {"measure": "latency", "case": f"{args.bytes} B", "who": who}
            rows.append(row | summary(np.array(series)))
            text = "{who:<22} {median_us:7.1f} us   {p10_us:7.1f} .. {p90_us:7.1f}"
            print(text.format(**rows[-1]))
        save(args.json, rows)


if __name__ == "__main__":
    main()
