"""The memory that training needs per rank beyond the model and its gradients.

    mpirun -np 2 python benchmarks/gradient_memory.py hororing
    mpirun -np 2 python benchmarks/gradient_memory.py ddp          DDP, over gloo
    mpirun -np 2 python benchmarks/gradient_memory.py ddp-views    with gradient_as_bucket_view=True

With MALLOC_MMAP_THRESHOLD_=1048576, as in `make bench`, malloc returns freed memory to the system.

Each variant runs in its own job, so that none profits from what another has loaded or allocated.
The figures count anonymous and shared memory after three backward passes and their reductions.
Memory that ranks share counts once over all of them. Pages of files do not count: they are
libraries, which other processes use, too. `constant_MiB` is the memory for imports and
initialization, including MPI's; `total_MiB` includes it. tests/python/torch/test_torch_memory.py
compares the variants.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from record import arguments, save
from torch import nn

LAYERS = 16  # of 4 MiB
WAYS = ("hororing", "ddp", "ddp-views")


def held_mib() -> float:
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    counted = ("Pss_Anon:", "Pss_Shmem:")
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith(counted))


def steps(model: nn.Module, reduce: Callable[[], object] = lambda: None) -> None:
    for _ in range(3):
        for param in model.parameters():
            param.grad = None
        model(torch.ones(2, 1024)).mean().backward()
        reduce()


def with_ddp(model: nn.Module, views: bool) -> tuple[float, float]:
    """Return the memory held after initialization, and at the end."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    # Unique to this job: mpirun's process is the parent of all ranks.
    meeting = Path(tempfile.gettempdir(), f"gradient_memory-{os.getppid()}")
    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{what}"]) for what in ("RANK", "SIZE"))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    constant = held_mib()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
    steps(wrapped)
    dist.barrier()  # until then, all ranks hold their memory
    held = held_mib()
    dist.barrier()
    dist.destroy_process_group()
    meeting.unlink(missing_ok=True)
    return constant, held


def with_hororing(model: nn.Module, sgd: torch.optim.Optimizer) -> tuple[float, float]:
    """Return the same as `with_ddp`."""
    import hororing.torch as hvd

    hvd.init()
    constant = held_mib()
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    steps(model, optimizer.synchronize)
    hvd.barrier()
    held = held_mib()
    hvd.barrier()
    return constant, held


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("way", choices=WAYS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    layers = 2 if options.quick else LAYERS
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(layers)])
    # Before the first count: torch imports 70 MiB for its first optimizer; DDP needs them, too.
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    steps(model)
    before = held_mib()
    if options.way == "hororing":
        constant, held = with_hororing(model, sgd)
    else:
        constant, held = with_ddp(model, views=options.way == "ddp-views")
    report = {
        "rank": int(os.environ["OMPI_COMM_WORLD_RANK"]),
        "gradients_MiB": round(sum(param.nbytes for param in model.parameters()) / 2**20, 1),
        "constant_MiB": round(constant - before, 1),
        "total_MiB": round(held - before, 1),
    }
    print(json.dumps(report), flush=True)
    if options.json:
        import peers  # initializes MPI, which the job may not have used so far

        reports = peers.MPI.COMM_WORLD.gather(report)
        if reports:
            save(options.json, [
                {"measure": "memory of gradients", "case": f"rank {each['rank']}",
                 "who": options.way, **each}
                for each in reports
            ])  # fmt: skip


if __name__ == "__main__":
    main()
