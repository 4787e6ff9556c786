"""Collectives over several hosts: our algorithms, Open MPI and gloo against the network's limit.

    export OMPI_MCA_btl=self,sm,tcp OMPI_MCA_pml=ob1 OMPI_MCA_osc=^ucx
    tests/hosts.sh 4,4 -r 200mbit mpirun python benchmarks/hosts.py --mbit 200 --json result.json
    ... --collective allgather broadcast --bytes 4194304 --only auto mpi gloo

Contestants take turns in random order, in the same processes, on the same memory. A call's time is
that of the slowest rank; its processor time is the sum over all ranks. `over_mpi` is hororing with
MPI between the hosts, `tcp` is hororing with TCP.

`of_limit` is the least time in which the network can carry the collective, over the measured time.
Frames have 1,514 bytes, 1,448 of them data. As shares of the tensor: in an allreduce, each of H
hosts must send 2 (H - 1) / H; in a broadcast, a host must receive everything; in an all-gather or a
reduce-scatter, a host with k of N ranks must receive or send the parts of the others, (N - k) / N;
in an all-to-all, in which every rank has a tensor, it must send k (N - k) / N.

Figures are written after every turn. A contestant whose calls of one size have taken more than
--patience seconds in all gets no more turns. `turns` is the number of turns that count; if it is 0,
the figure is that of the first call, which otherwise is the warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

import hororing.torch as hvd

# Environment variables of hororing's variants. `flat` ignores that ranks of a host share memory.
OURS = {
    "auto": {},
    "tcp": {"HORORING_TRANSPORT": "tcp"},
    "over_mpi": {"HORORING_TRANSPORT": "mpi"},
    "flat": {"HORORING_BACKEND": "host"},
}
WORLD = MPI.COMM_WORLD
PAYLOAD = 1448 / 1514  # TCP over Ethernet


# Bytes that some host must send or receive, over those of the tensor, from the ranks on each host.
NEEDS: dict[str, Callable[[list[int]], float]] = {
    "allreduce": lambda on: 2 * (len(on) - 1) / len(on),
    "allgather": lambda on: 1 - min(on) / sum(on),
    "reducescatter": lambda on: 1 - min(on) / sum(on),
    "broadcast": lambda on: 1.0,
    "alltoall": lambda on: max(ranks * (1 - ranks / sum(on)) for ranks in on),
}
NO_PEER = {("reducescatter", "gloo")}  # gloo does not have it


def own_part(x: torch.Tensor) -> torch.Tensor:
    return x.tensor_split(WORLD.Get_size())[WORLD.Get_rank()]


def of_mpi(collective: str) -> Callable[[torch.Tensor], object]:
    return {
        "allreduce": lambda x: WORLD.Allreduce(MPI.IN_PLACE, x.numpy()),
        "broadcast": lambda x: WORLD.Bcast(x.numpy()),
        "allgather": lambda x: WORLD.Allgather(own_part(x).numpy(), x.numpy()),
        "reducescatter": lambda x: WORLD.Reduce_scatter_block(
            x.numpy(), own_part(x).numpy().copy()
        ),
        "alltoall": lambda x: WORLD.Alltoall(x.numpy(), np.empty_like(x.numpy())),
    }[collective]


def of_gloo(collective: str) -> Callable[[torch.Tensor], object]:
    return {
        "allreduce": dist.all_reduce,
        "broadcast": lambda x: dist.broadcast(x, 0),
        "allgather": lambda x: dist.all_gather_into_tensor(x, own_part(x).clone()),
        "alltoall": lambda x: dist.all_to_all_single(torch.empty_like(x), x),
    }[collective]


def contestant(name: str, collective: str) -> Callable[[torch.Tensor], object]:
    """Return a function that runs the collective on all ranks' parts, in place if possible."""
    if name == "mpi":
        return of_mpi(collective)
    if name == "gloo":
        return of_gloo(collective)
    chosen = {"HORORING_BACKEND": "auto", "HORORING_TRANSPORT": "auto"} | OURS[name]
    if not hvd.is_initialized() or not chosen.items() <= os.environ.items():
        hvd.shutdown()
        os.environ.update(chosen)
        hvd.init()
    return {
        "allreduce": lambda x: hvd.allreduce_(x, op=hvd.Sum, name="benchmark"),
        "broadcast": lambda x: hvd.broadcast_(x, root_rank=0, name="benchmark"),
        "allgather": lambda x: hvd.allgather(own_part(x), name="benchmark"),
        "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum, name="benchmark"),
        "alltoall": lambda x: hvd.alltoall(x, name="benchmark"),
    }[collective]


def wait_for_all() -> None:
    everybody = WORLD.Ibarrier()
    while not everybody.Test():
        time.sleep(20e-6)


def timed(
    run: Callable[[torch.Tensor], object], tensor: torch.Tensor, calls: int
) -> tuple[float, float]:
    """Return seconds per call on the slowest rank, and processor time summed over the ranks."""
    wait_for_all()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        run(tensor)
    elapsed = (time.perf_counter() - begin) / calls
    cpu = (time.process_time() - begin_cpu) / calls
    wait_for_all()  # sleeps while slower ranks still work
    return WORLD.allreduce(elapsed, MPI.MAX), WORLD.allreduce(cpu, MPI.SUM)


class Series(NamedTuple):
    """A contestant's times at one size, in s per call: of each turn, or of the first call only."""

    seconds: list[float]
    cpu: list[float]
    turns: int = 0


Measured = dict[int, dict[str, Series]]  # by size, by contestant


def measure(collective: str, names: list[str], tensors: dict[int, torch.Tensor],
            order: random.Random, turns: int, patience_s: float) -> Iterator[Measured]:  # fmt: skip
    """Yield all measurements so far, after every turn."""
    names = [name for name in names if (collective, name) not in NO_PEER]
    found: Measured = {nbytes: {} for nbytes in tensors}
    left = {(name, nbytes): patience_s for name in names for nbytes in tensors}
    for _ in range(turns):
        for name in order.sample(names, len(names)):
            sizes = [nbytes for nbytes in tensors if left[name, nbytes] > 0]
            if not sizes:
                continue
            run = contestant(name, collective)
            for nbytes in sizes:
                first, cpu = timed(run, tensors[nbytes], 1)  # warms up
                left[name, nbytes] -= first
                so_far = found[nbytes].setdefault(name, Series([first], [cpu]))
                if left[name, nbytes] <= 0:
                    continue
                calls = max(1, min(20, (256 << 10) // nbytes))
                seconds, cpu = timed(run, tensors[nbytes], calls)
                left[name, nbytes] -= seconds * calls
                if not so_far.turns:
                    so_far = Series([], [])
                found[nbytes][name] = Series(
                    [*so_far.seconds, seconds], [*so_far.cpu, cpu], so_far.turns + 1
                )
            yield found


def shares(of_size: dict[str, Series], limit: float) -> dict[str, dict[str, float]]:
    """Return every contestant's time, and the share of it that the network needs."""
    return {
        name: {
            "turns": series.turns,
            "median_us": statistics.median(series.seconds) * 1e6,
            "p10_us": float(np.percentile(series.seconds, 10)) * 1e6,
            "p90_us": float(np.percentile(series.seconds, 90)) * 1e6,
            "of_limit": limit / statistics.median(series.seconds),
            "cpu_us": statistics.median(series.cpu) * 1e6,
        }
        for name, series in of_size.items()
    }


def show(row: dict[str, Any]) -> None:
    """Print the figures of one size of one collective."""
    for name, figures in row.items():
        if not isinstance(figures, dict):
            continue
        median, low, high = (figures[f"{which}_us"] / 1e3 for which in ("median", "p10", "p90"))
        print(f"{row['collective']:<13} {row['bytes']:>9} {name:<20} {median:9.3f} ms "
              f"({low:.1f} to {high:.1f})  {figures['of_limit']:6.1%}  "
              f"{figures['cpu_us'] / 1e3:9.3f} ms of processors"
              f"{'' if figures['turns'] else '  first call'}", flush=True)  # fmt: skip


def write(path: Path, report: dict[str, Any]) -> None:
    """Replace the file atomically: this process may be killed at any time."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(report, indent=1) + "\n")
    beside.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, required=True, help="nominal rate of the links")
    parser.add_argument("--bytes", type=int, nargs="+", default=[4, 65536, 1 << 20, 16 << 20])
    parser.add_argument("--collective", choices=list(NEEDS), nargs="+", default=["allreduce"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=[*OURS, "mpi", "gloo"])
    parser.add_argument("--patience", type=float, default=30, help="s per contestant and size")
    parser.add_argument("--json", help="file to write the results to")
    arguments = parser.parse_args()

    rank, size = WORLD.Get_rank(), WORLD.Get_size()
    names = WORLD.allgather(platform.node())
    leaders = [names.index(name) for name in dict.fromkeys(names)]
    on = [names.count(names[leader]) for leader in leaders]
    if "gloo" in arguments.only:
        dist.init_process_group(
            "gloo", init_method=f"tcp://{names[0]}:29551", rank=rank, world_size=size
        )
    rate = arguments.mbit * 1e6 / 8 * PAYLOAD
    order = random.Random(WORLD.bcast(random.randrange(2**32)))
    # MPI's calls need parts of equal size.
    tensors = {
        nbytes: torch.zeros(max(1, nbytes // 4 // size) * size if nbytes >= 4 * size else 1)
        for nbytes in arguments.bytes
    }
    facts = {
        "layout": on,
        "mbit": arguments.mbit,
        "rounds": arguments.rounds,
        "mpi": MPI.Get_library_version().splitlines()[0].rstrip("\0"),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    done: list[dict[str, Any]] = []
    for collective in arguments.collective:
        rows: list[dict[str, Any]] = []
        for found in measure(collective, arguments.only, tensors, order, arguments.rounds,
                             arguments.patience):  # fmt: skip
            rows = []
            for nbytes, of_size in found.items():
                limit = NEEDS[collective](on) * tensors[nbytes].nbytes / rate
                row = {"collective": collective, "bytes": nbytes}
                rows.append(row | shares(of_size, limit))
            if rank == 0 and arguments.json:
                write(Path(arguments.json), facts | {"results": done + rows})
        done += rows
        for row in rows if rank == 0 else []:
            show(row)
    hvd.shutdown()


if __name__ == "__main__":
    main()
