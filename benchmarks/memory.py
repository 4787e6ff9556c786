"""hororing's own memory per rank, beyond the script's.

    mpirun -np 2 python benchmarks/memory.py

Reads the proportional set size (shared pages count once over all ranks) before init, after init,
and after summing 256 MB of gradients in 200 tensors, fused and one by one. The promise is at most
twice the fusion buffer (64 MiB) plus 32 MiB; tests/python/core/test_memory.py checks it, and
test_torch_memory.py compares training with DDP. In a process that has initialized hororing before,
init takes less. Horovod, if installed, runs after hororing: its figures are what it adds.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from typing import Any

import psutil
import torch
from record import arguments, save

import hororing.torch as hvd

MIB = 1 << 20


def pss_mib() -> float:
    return psutil.Process().memory_full_info().pss / MIB


def measured(
    who: str, init: Callable[[], object], verbs: Any, gradients: list[torch.Tensor]
) -> dict[str, Any]:
    """Measure one contestant on this rank, from before its initialization."""
    before = pss_mib()
    init()
    after_init = pss_mib()
    for _ in range(3):
        handles = [verbs.allreduce_async_(g, name=f"g{i}") for i, g in enumerate(gradients)]
        for handle in handles:
            verbs.synchronize(handle)
        verbs.grouped_allreduce_(gradients, name="all")
    return {
        "who": who,
        "rank": hvd.rank(),
        "init_MiB": round(after_init - before, 1),
        "sums_MiB": round(pss_mib() - before, 1),
    }


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__).parse_args(argv)
    total = MIB if options.quick else 256 * MIB
    torch.set_num_threads(1)
    gradients = [torch.zeros(total // 4 // 200) for _ in range(200)]
    for gradient in gradients:
        gradient.fill_(1.0)
    figures = [measured("hororing", hvd.init, hvd, gradients)]
    import horovod_peer  # only now: it initializes MPI, which counts as hororing's memory

    with contextlib.ExitStack() as awake:
        for name, peer in horovod_peer.found(["1"]).items():
            start = functools.partial(awake.enter_context, peer.awake())
            figures.append(measured(name, start, peer.verbs, gradients))
    reports = [each for of_rank in hvd.allgather_object(figures) for each in of_rank]
    if hvd.rank() == 0:
        for each in reports:
            print(json.dumps(each))
        rows = [
            {"measure": "memory", "case": f"rank {each['rank']}", "who": each["who"],
             "init_MiB": each["init_MiB"], "sums_MiB": each["sums_MiB"]}
            for each in reports
        ]  # fmt: skip
        save(options.json, rows)


if __name__ == "__main__":
    main()
