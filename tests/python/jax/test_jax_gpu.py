"""Compiled functions on GPUs: what is lowered for CUDA, and its handler, over the fake GPU.

Nothing here needs a GPU or jaxlib for CUDA, or shows that they work: benchmarks/gpu.sh does.
"""

from __future__ import annotations

import os

import fake_gpu
import mpirun
import pytest
import tiers

if __name__ == "cases":  # on the ranks
    os.environ["JAX_PLATFORMS"] = "cpu"

    import jax
    import jax_gpu_calls
    import numpy as np
    from jax import numpy as jnp

    import hororing.jax as hvd
    from hororing._requests.handles import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST, REDUCESCATTER

    hvd.init()
    fake_gpu.set_("delay_us", 500)
    RANK, SIZE = hvd.rank(), hvd.size()
    STREAM = jax_gpu_calls.Stream(hvd.local_rank())

FAKE = fake_gpu.path()


def called(name, collective, mine, result, op=0, root=0):
    """Return what a kernel reads that XLA starts after the call."""
    argument, seen = np.zeros_like(mine), np.full_like(result, -1)
    STREAM.run(lambda: argument.__setitem__(..., mine))  # XLA is still computing it
    integers = [collective, 0, op, root, 0]
    error = STREAM.call(name, integers, [1.0, 1.0, 0.0], [argument], [result])
    assert error == ""
    STREAM.run(lambda: seen.__setitem__(..., result))
    STREAM.synchronize()
    return seen


def case_results_are_in_the_order_of_the_stream():
    before = fake_gpu.count("collectives")
    rows = np.arange(4.0 * SIZE, dtype=np.float32).reshape(2 * SIZE, 2)
    total = sum(rows + rank for rank in range(SIZE))
    mine = rows + np.float32(RANK)
    found = called("sum", ALLREDUCE, mine, np.empty_like(mine), hvd.Sum)
    assert (found == total).all()
    found = called("root", BROADCAST, mine, np.empty_like(mine), root=SIZE - 1)
    assert (found == rows + SIZE - 1).all()
    found = called("part", REDUCESCATTER, mine, np.empty_like(mine[:2]), hvd.Sum)
    assert (found == total[2 * RANK : 2 * RANK + 2]).all()
    found = called("rows", ALLGATHER, mine, np.empty((2 * SIZE * SIZE, 2), np.float32))
    assert (found == np.concatenate([rows + rank for rank in range(SIZE)])).all()
    found = called("moved", ALLTOALL, mine, np.empty_like(mine))
    wanted = [rows[2 * RANK : 2 * RANK + 2] + rank for rank in range(SIZE)]
    assert (found == np.concatenate(wanted)).all()
    if os.environ["HORORING_GPU"] == "nccl":
        assert fake_gpu.count("collectives") > before
    assert fake_gpu.violations() == ""


def case_errors_are_those_of_the_host():
    x = np.ones(3 + RANK, np.float32)
    error = STREAM.call("odd", [ALLREDUCE, 0, hvd.Sum, 0, 0], [1.0, 1.0, 0.0], [x], [x])
    assert "MismatchError: allreduce 'odd'" in error
    assert "shapes differ: rank 0: [3]; rank 1: [4]" in error
    ragged = np.empty(SIZE * (3 + RANK), np.float32)
    error = STREAM.call("ragged", [ALLGATHER, 0, 0, 0, 0], [1.0, 1.0, 0.0], [x], [ragged])
    assert "all ranks pass equally many rows" in error
    error = STREAM.call("old", [ALLREDUCE, 0, 1, 0, 0], [1.0, 1.0, 0.0], [x], [x], api_size=160)
    assert "does not tell which GPU" in error
    error = STREAM.call("other", [ALLREDUCE, 0, 1, 0], [1.0, 1.0, 0.0], [x], [x])
    assert "compiled for another version of hororing" in error
    assert hvd.allreduce(jnp.ones(2), op=hvd.Sum)[0] == SIZE
    assert fake_gpu.violations() == ""


def case_what_is_lowered_for_cuda():
    def text(function, *arrays):
        lowered = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))
        return lowered.as_text()

    x = jnp.ones(3)
    for function in (lambda x: hvd.allreduce(x, op=hvd.Sum), hvd.barrier):
        assert f"integers = dense<[{ALLREDUCE}, 0, {hvd.Sum}, 0, 0]>" in text(function, x)
    with pytest.raises(NotImplementedError, match="a weight must be a number"):
        text(lambda x, w: hvd.allreduce(x, weight=w), x, x[0])
    with pytest.raises(NotImplementedError, match="on CPUs and on GPUs of NVIDIA"):
        jax.jit(hvd.allreduce).trace(x).lower(lowering_platforms=("tpu",))


@tiers.full
@pytest.mark.skipif(FAKE is None, reason="the fake GPU is not built; make test-cpp builds it")
@pytest.mark.parametrize("case", mpirun.case_names(globals()))
@pytest.mark.parametrize("way", ["nccl", "staged"])
def test_case(case: str, way: str) -> None:
    variables = fake_gpu.environment(FAKE, HORORING_GPU=way)
    mpirun.cases_of(__file__, 2, **variables).check(case)
