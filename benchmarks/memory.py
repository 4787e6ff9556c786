"""What hororing itself holds per rank, beyond the script's own memory.

    mpirun -np 2 python benchmarks/memory.py

Reads the proportional set size (shared pages counted once over all ranks) before init, after
init and after summing 256 MB of gradients in 200 tensors, fused and one by one. The promise is
at most twice the fusion buffer (64 MiB) plus 32 MiB; tests/python/test_memory.py holds it against
that, and test_torch_memory.py bucket views against DDP. A process that has initialised hororing
before (as where several benchmarks share one) reports less for init.
"""

from __future__ import annotations

import json

import psutil
import torch
from record import arguments, save

import hororing.torch as hvd

MIB = 1 << 20


def pss_mib() -> float:
    return psutil.Process().memory_full_info().pss / MIB


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__).parse_args(argv)
    total = MIB if options.quick else 256 * MIB
    torch.set_num_threads(1)
    gradients = [torch.zeros(total // 4 // 200) for _ in range(200)]
    for gradient in gradients:
        gradient.fill_(1.0)
    before = pss_mib()
    hvd.init()
    after_init = pss_mib()
    for _ in range(3):
        handles = [hvd.allreduce_async_(g, name=f"g{i}") for i, g in enumerate(gradients)]
        for handle in handles:
            hvd.synchronize(handle)
        hvd.grouped_allreduce_(gradients, name="all")
    after_sums = pss_mib()
    report = {
        "rank": hvd.rank(),
        "init_MiB": round(after_init - before, 1),
        "sums_MiB": round(after_sums - before, 1),
    }
    reports = hvd.allgather_object(report)
    if hvd.rank() == 0:
        for each in reports:
            print(json.dumps(each))
        rows = [
            {"measure": "memory", "case": f"rank {each['rank']}", "who": "hororing",
             "init_MiB": each["init_MiB"], "sums_MiB": each["sums_MiB"]}
            for each in reports
        ]  # fmt: skip
        save(options.json, rows)


if __name__ == "__main__":
    main()
