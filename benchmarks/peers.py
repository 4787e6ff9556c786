"""The peers on this machine: their names, their versions, and how to run them.

mpi4py finds Open MPI or MPICH, so the other one needs its own run (`make bench-mpich` makes an
environment for it). Horovod is in horovod_peer.py.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

Sum = Callable[[Any], object]


def mpi_name() -> str:
    """Return name and version ("Open MPI 5.0.11"), and `BENCHMARK_MPI_NOTE`: how it is tuned."""
    vendor, version = MPI.get_vendor()
    note = os.environ.get("BENCHMARK_MPI_NOTE")
    return f"{vendor} {'.'.join(map(str, version))}" + (f", {note}" if note else "")


def join_gloo() -> None:
    """Initialize torch.distributed's default group over gloo, once per process."""
    import torch.distributed as dist  # here, because not all benchmarks need it

    if dist.is_initialized():
        return
    here = MPI.COMM_WORLD.rank
    folder = MPI.COMM_WORLD.bcast(tempfile.mkdtemp(prefix="bench-") if here == 0 else None)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/gloo", rank=here, world_size=MPI.COMM_WORLD.size
    )


def sums(names: list[str] | None = None) -> dict[str, Sum]:
    """Return the peers by name; each sums its argument over all ranks, in place, and blocks."""
    found: dict[str, Sum] = {
        mpi_name(): lambda tensor: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy())
    }
    if names is None or "gloo" in names:
        import torch.distributed as dist

        join_gloo()
        found["gloo"] = dist.all_reduce
    return found


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Return the version of every contestant, by package; None if it is not installed."""
    packages = ("hororing", "torch", "tensorflow-cpu", "keras", "horovod", "mpi4py", "numpy")
    return {"mpi": mpi_name(), **{name: version(name) for name in packages}}
