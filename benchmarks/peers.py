"""The peers that can be found here: what they are called, their versions, how to run them.

Open MPI or MPICH is the MPI that mpi4py finds, so the other one needs a run of its own (`make
bench` makes it an environment). Horovod is in horovod_peer.py.
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
    """Name and version: "Open MPI 5.0.11"; `BENCHMARK_MPI_NOTE` says how it was tuned."""
    vendor, version = MPI.get_vendor()
    note = os.environ.get("BENCHMARK_MPI_NOTE")
    return f"{vendor} {'.'.join(map(str, version))}" + (f", {note}" if note else "")


def join_gloo() -> None:
    """Make torch.distributed's default group, of gloo, once per process."""
    import torch.distributed as dist  # not of all benchmarks' business

    if dist.is_initialized():
        return
    here = MPI.COMM_WORLD.rank
    folder = MPI.COMM_WORLD.bcast(tempfile.mkdtemp(prefix="bench-") if here == 0 else None)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/gloo", rank=here, world_size=MPI.COMM_WORLD.size
    )


def sums(names: list[str] | None = None) -> dict[str, Sum]:
    """Peers by name; each sums its argument over all ranks, in place, and waits for it."""
    found: dict[str, Sum] = {
        mpi_name(): lambda tensor: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy())
    }
    if names is None or "gloo" in names:
        import torch.distributed as dist

        join_gloo()
        found["gloo"] = dist.all_reduce
    return found


def version(package: str) -> str | None:
    """The installed version of a package, None where it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """All that take part, by package; None: not found here."""
    packages = ("hororing", "torch", "tensorflow-cpu", "keras", "horovod", "mpi4py", "numpy")
    return {"mpi": mpi_name(), **{name: version(name) for name in packages}}
