"""HORORING_REPRODUCIBLE=1: the same bits in every run, whatever the order of gradients.

A run has its own engine. There are 20 runs, one after the other, and every rank submits in another
order in each of them.
"""

from __future__ import annotations

import hashlib
import os
import random

import mpirun
import numpy as np
import pytest
import tiers

import hororing.numpy as hvd

RUNS = 20
# Small tensors, which are fused, and some that use blocks, segments and other algorithms.
ELEMENTS = [*range(1, 40, 3), 1009, 20_011, 300_007]
WAYS = {
    "shared memory": {},
    "messages": {"HORORING_BACKEND": "host"},
    "MPI": {"HORORING_TRANSPORT": "mpi"},
}


def passed(rank: int, index: int, elements: int) -> np.ndarray:
    # The magnitudes differ so much that every order of summation gives other bits.
    random_values = np.random.default_rng([mpirun.seed(), rank, index])
    exponents = random_values.integers(-20, 20, elements)
    return np.ldexp(random_values.standard_normal(elements), exponents).astype(np.float32)


def one_run(run: int) -> str:
    hvd.init()
    rank = hvd.rank()
    arrays = [passed(rank, index, elements) for index, elements in enumerate(ELEMENTS)]
    order = list(range(len(arrays)))
    random.Random(f"{mpirun.seed()} {run} {rank}").shuffle(order)
    handles = {
        index: hvd.allreduce_async(arrays[index], name=str(index), op=hvd.Average)
        for index in order
    }
    bits = hashlib.sha256()
    for index in range(len(arrays)):
        bits.update(hvd.synchronize(handles[index]).tobytes())
    digests = hvd.allgather_object(bits.hexdigest())
    hvd.shutdown()
    assert set(digests) == {digests[0]}, "ranks hold different bits"
    return digests[0]


def case_20_runs_give_the_same_bits() -> None:
    assert os.environ["HORORING_REPRODUCIBLE"] == "1"
    assert len({one_run(run) for run in range(RUNS)}) == 1


@pytest.mark.parametrize("size", tiers.choose([2, 3, 4], push=[3]))
@pytest.mark.parametrize("way", WAYS)
def test_20_runs_give_the_same_bits(way: str, size: int) -> None:
    job = mpirun.run(
        __file__, size, script=False, environment={"HORORING_REPRODUCIBLE": "1", **WAYS[way]}
    )
    job.check("case_20_runs_give_the_same_bits")


# Between hosts, measured costs would choose the algorithm.
@pytest.mark.skipif(bool(mpirun.why_no_hosts()), reason=mpirun.why_no_hosts())
@pytest.mark.parametrize("layout", tiers.choose(["1,1,1", "2,1,1"], push=["2,1,1"]))
def test_20_runs_over_hosts_give_the_same_bits(layout: str) -> None:
    size = sum(map(int, layout.split(",")))
    job = mpirun.run(
        __file__, size, script=False, hosts=layout, environment={"HORORING_REPRODUCIBLE": "1"}
    )
    job.check("case_20_runs_give_the_same_bits")
