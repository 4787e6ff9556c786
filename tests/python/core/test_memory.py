"""hororing's own memory per rank, beyond the script's.

It is measured as proportional set size: memory that ranks share counts once over all of them. The
ranks' malloc returns freed memory to the system (GIVE_BACK), so only memory in use counts.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import mpirun
import numpy as np
import pytest
import tiers
from mpirun import GIVE_BACK

import hororing.numpy as hvd

MIB = 1 << 20
JOBS = [(2, "auto", 64), (4, "auto", 1), (2, "host", 1), (4, "host", 64)]


def held_mib() -> float:
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


def case_sums_take_two_fusion_buffers_and_32_mib_at_most() -> None:
    fusion = int(os.environ["HORORING_FUSION_BYTES"])
    gradients = [np.ones(MIB, np.float32) for _ in range(40)]
    before = held_mib()
    hvd.init()
    for _ in range(3):
        handles = [hvd.allreduce_async_(g, name=f"{i}") for i, g in enumerate(gradients)]
        for handle in handles:
            hvd.synchronize(handle)
        hvd.grouped_allreduce_(gradients, name="all")
    # The counter covers a part of it.
    scratch = hvd.statistics()["scratch_bytes"] / MIB
    held = held_mib() - before
    assert scratch <= held <= 2 * fusion / MIB + 32, (scratch, held)
    hvd.barrier()


@pytest.mark.timeout(mpirun.CASES_LIMIT_S + 20)
@pytest.mark.parametrize(("size", "backend", "fusion_mib"), tiers.choose(JOBS, JOBS[1:2]))
@pytest.mark.parametrize("case", mpirun.case_names(globals()))
def test_on_ranks(case: str, size: int, backend: str, fusion_mib: int) -> None:
    variables = {
        "HORORING_BACKEND": backend,
        "HORORING_FUSION_BYTES": str(fusion_mib * MIB),
        **GIVE_BACK,
    }
    mpirun.cases_of(__file__, size, **variables).check(case)
