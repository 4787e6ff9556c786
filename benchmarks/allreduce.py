"""In-place sums of 4 B to 256 MiB: hororing, MPI_Allreduce, gloo and, if installed, Horovod.

    mpirun -np 2 python benchmarks/allreduce.py --json result.json
    mpirun -np 2 python benchmarks/allreduce.py --dtypes float32 float16 bfloat16 --elements

turns.py does the timing. `algbw` is bytes / time and `busbw` is algbw * 2 (N - 1) / N, as in
nccl-tests. With --elements, sizes count float32 elements, and all dtypes take turns with one
another, so that they are compared per element.

`copy (limit)` shows the memory bandwidth: all ranks copy their tensors at once. An in-place sum
must read every rank's tensor and write every rank's result; a copy reads and writes as much. An
algorithm reaches this limit only if its other traffic (slots, temporaries, messages) stays in
caches.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import horovod_peer
import peers
import torch
from record import Row, arguments, human, print_rows, save
from turns import summary, take_turns

import hororing.torch as hvd

SIZES = [4, 256, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20,
         256 << 20]  # fmt: skip

LIMIT = "copy (limit)"


def series_length(nbytes: int) -> int:
    """The number of calls in about 2 ms, if a call takes 20 us and a byte 0.2 ns."""
    return max(1, min(50, int(2e-3 / (20e-6 + 0.2e-9 * nbytes))))


def ways_of(nbytes: int, dtype: str, options) -> tuple[int, dict[str, Callable[[], object]]]:
    """Return the number of elements of a tensor, and all contestants that support the dtype."""
    kind = getattr(torch, dtype)
    count = max(1, nbytes // (4 if options.elements else kind.itemsize))
    tensor = torch.zeros(count, dtype=kind)
    tensor.fill_(0.0)  # its own pages, not the shared zero page
    runs = dict(options.runs)
    if dtype != "float32":  # MPI has no 16-bit floats, and NumPy has no bfloat16
        runs.pop(peers.mpi_name())
    if dtype != "bfloat16":  # Horovod does not support it
        runs |= {name: peer.sum for name, peer in options.horovods.items()}
    ways = {name: (lambda run=run: run(tensor)) for name, run in runs.items()}
    if dtype == "float32" and options.limit:
        target = torch.empty_like(tensor).fill_(0.0)
        ways[LIMIT] = lambda: target.copy_(tensor)
    return count, ways


def rows_of(nbytes: int, dtypes: list[str], options) -> list[Row]:
    """Measure one size: all dtypes take turns with one another."""
    ways: dict[tuple[str, str], Callable[[], object]] = {}
    counts = {}
    for dtype in dtypes:
        counts[dtype], of_dtype = ways_of(nbytes, dtype, options)
        ways |= {(dtype, who): way for who, way in of_dtype.items()}
    times = take_turns(
        ways,
        options.order,
        calls=series_length(nbytes),
        seconds=options.seconds,
        rounds=(2, 2) if options.quick else (7, 200),
        around={key: options.horovods[key[1]].awake for key in ways if key[1] in options.horovods},
    )
    rows = []
    for (dtype, who), series in times.items():
        figures = summary(series)
        size = counts[dtype] * getattr(torch, dtype).itemsize
        algbw = size / figures["median_us"] / 1e3
        rows.append({
            "measure": f"{dtype} sum",
            "case": human(nbytes) + (" as float32" if options.elements else ""),
            "who": who, "nbytes": size, "elements": counts[dtype], **figures,
            "algbw_GBps": algbw, "busbw_GBps": algbw * 2 * (hvd.size() - 1) / hvd.size(),
        })  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="in bytes")
    parser.add_argument("--max-bytes", type=int, default=SIZES[-1], help="largest size")
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--elements", action="store_true", help="compare per element")
    parser.add_argument("--limit", action="store_true", help="also time memory copies")
    parser.add_argument("--peers", nargs="*", choices=["gloo"], help="besides MPI")
    horovod_peer.add_option(parser)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    hvd.init()
    options.runs = {
        "hororing": lambda x: hvd.allreduce_(x, op=hvd.Sum, name="benchmark"),
        **peers.sums(options.peers),
    }
    options.horovods = horovod_peer.found(options.horovod)
    options.order = random.Random(options.seed)
    rows = []
    largest = min(options.max_bytes, 1 << 20) if options.quick else options.max_bytes
    for nbytes in (size for size in options.sizes if size <= largest):
        for dtypes in [options.dtypes] if options.elements else [[x] for x in options.dtypes]:
            rows += (case := rows_of(nbytes, dtypes, options))
            if hvd.rank() == 0:
                print_rows(case)
                save(options.json, rows)


if __name__ == "__main__":
    main()
