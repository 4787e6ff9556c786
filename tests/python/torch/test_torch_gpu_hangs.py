"""Calls of CUDA and NCCL that never return, over tests/fake_gpu: waiting callers get an error."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import fake_gpu
import mpirun
import pytest
import tiers

FAKE = fake_gpu.path()


def stay_in(function: str) -> None:
    """The last rank stays in a function of NCCL, while a blocking call waits for it.

    On one host, waiting callers run the loop (ADR 12), but must not be inside that function.
    """
    import torch

    import hororing.torch as hvd
    from hororing import errors

    fake_gpu.stand_in()
    hvd.init()
    hvd.allreduce(torch.ones(3), name="before")
    stuck = hvd.rank() == hvd.size() - 1
    if stuck:
        fake_gpu.hang_in(function)

    def reduce_twice() -> None:
        """On the other ranks, "x" fails in the stream, at the deadline, and "y" reports it."""
        hvd.allreduce(torch.ones(3), name="x")
        hvd.allreduce(torch.ones(3), name="y")

    began = time.monotonic()
    with pytest.raises(errors.TransportError) as failed:
        reduce_twice()
    assert time.monotonic() - began < 20
    text = str(failed.value)
    if stuck:
        assert f"{function} of NCCL has not returned" in text, text
        assert "in a batch of allreduce 'x'" in text, text
        with pytest.raises(errors.HororingInternalError, match=function):
            hvd.allreduce(torch.ones(3), name="z")
    hvd.shutdown()
    assert time.monotonic() - began < 30
    print("told", flush=True)


def stay_joined(function: str) -> None:
    """The same for a rank that waits in join, and has not used a device before."""
    import torch

    import hororing.torch as hvd
    from hororing import errors

    fake_gpu.stand_in()
    hvd.init()
    hvd.barrier()
    joins = hvd.rank() == hvd.size() - 1
    if joins:
        fake_gpu.hang_in(function)

    def reduce_unless_joined() -> None:
        if not joins:
            hvd.allreduce(torch.ones(3), name="x")
            hvd.allreduce(torch.ones(3), name="y")
        hvd.join()

    began = time.monotonic()
    with pytest.raises(errors.TransportError) as failed:
        reduce_unless_joined()
    assert time.monotonic() - began < 20
    told = Path(os.environ["TMPDIR"], "told")
    if joins:
        assert f"{function} of NCCL has not returned" in str(failed.value), failed.value
        told.touch()
    while not told.exists() and time.monotonic() - began < 20:
        time.sleep(0.01)  # mpirun ends the job with the first rank that ends
    hvd.shutdown()
    print("told", flush=True)


def stay_in_the_queue(_: str) -> None:
    """A collective hangs, work behind it fills the GPU's queue, and the driver lets no thread in.

    The script waits for the GPU, not for hororing, which frees it nevertheless.
    """
    import torch

    import hororing.torch as hvd
    from hororing import errors

    fake_gpu.stand_in()
    hvd.init()
    hvd.allreduce(torch.ones(3), name="before")
    fake_gpu.set_("hang_after", 0)
    handle = hvd.allreduce_async(torch.ones(3), name="x")
    while not hvd.poll(handle):
        time.sleep(0.01)
    fake_gpu.set_("full_queue", fake_gpu.count("aborts") + 1)
    began = time.monotonic()
    while fake_gpu.count("aborts") == 0 and time.monotonic() - began < 20:
        time.sleep(0.01)
    fake_gpu.set_("hang_after", -1)
    with pytest.raises(errors.HororingInternalError, match="has not returned"):
        hvd.allreduce(torch.ones(3), name="y")
    hvd.shutdown()
    fake_gpu.set_("full_queue", 0)
    hvd.init()
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name="again").tolist() == [hvd.size()] * 3
    assert fake_gpu.count("aborts") > 0
    hvd.shutdown()
    print("told", flush=True)


@tiers.full
@pytest.mark.skipif(FAKE is None, reason="the fake GPU is not built; make test-cpp builds it")
def test_a_process_whose_gpu_was_full_of_stuck_work_trains_again():
    assert FAKE is not None
    variables = fake_gpu.environment(FAKE, HORORING_TIMEOUT_S="2", HORORING_GPU="nccl")
    job = mpirun.run(__file__, 2, "queue", "queue", environment=variables, timeout_s=60)
    for rank in range(2):
        assert "told" in job.outputs[rank], job.report()


@tiers.full
@pytest.mark.skipif(FAKE is None, reason="the fake GPU is not built; make test-cpp builds it")
@pytest.mark.parametrize("function", ["ncclGroupEnd", "ncclAllReduce"])
def test_a_call_of_nccl_that_does_not_return_is_an_error_for_who_waits(function: str):
    assert FAKE is not None
    variables = fake_gpu.environment(FAKE, HORORING_TIMEOUT_S="2", HORORING_GPU="nccl")
    job = mpirun.run(__file__, 2, function, environment=variables)
    for rank in range(2):
        assert "told" in job.outputs[rank], job.report()


@tiers.full
@pytest.mark.skipif(FAKE is None, reason="the fake GPU is not built; make test-cpp builds it")
def test_the_first_call_of_nccl_after_a_join_is_not_made_by_who_waits():
    assert FAKE is not None
    variables = fake_gpu.environment(FAKE, HORORING_TIMEOUT_S="2", HORORING_GPU="nccl")
    job = mpirun.run(
        __file__, 2, "ncclCommInitRankConfig", "joined", environment=variables, timeout_s=40
    )
    for rank in range(2):
        assert "told" in job.outputs[rank], job.report()


if __name__ == "__main__":
    ways = {"joined": stay_joined, "queue": stay_in_the_queue}
    ways.get(sys.argv[-1], stay_in)(sys.argv[1])
