"""Ranks that are killed, slow or out of step on purpose."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

import hororing.numpy as hvd
import hororing.testing
from hororing import elastic
from hororing.errors import PeerLostError
from hororing.numpy import grouped_allreduce
from hororing.testing import mark


@pytest.mark.ranks(3)
def test_a_rank_dies_at_its_third_allreduce():
    hororing.testing.kill(rank=1, at="allreduce:3")
    for _ in range(2):
        hvd.barrier()
        grouped_allreduce([np.ones(2)] * 2)
    with pytest.raises(PeerLostError) as caught:
        hvd.allreduce(np.ones(2))
    assert caught.value.rank == 1


@pytest.mark.ranks(2)
def test_a_later_test_has_all_ranks_and_no_fault():
    for _ in range(3):
        assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == 2
    began = time.perf_counter()
    hvd.barrier()
    hororing.testing.slow(rank=1, ms=100)
    hvd.barrier()
    hvd.allgather(np.ones(1))
    assert time.perf_counter() - began >= 0.2


@pytest.mark.ranks(3, elastic=True)
def test_the_survivors_of_an_elastic_job_go_on():
    hororing.testing.kill(rank=2, at="allreduce:3")
    state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)

    @elastic.run
    def train(state):
        while state.step < 5:
            assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="ones")[0] == hvd.size()
            state.step += 1
            state.commit()

    train(state)
    assert (state.step, hvd.size()) == (5, 2)


@pytest.mark.ranks(2)
@hororing.testing.interleave(seeds=[3, 4])
def test_delays_depend_on_seed_and_rank(interleave):
    began = time.perf_counter()
    for _ in range(10):
        hvd.barrier()
    assert time.perf_counter() - began > 0.005
    assert interleave in (3, 4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("at", ["allreduce", "allreduce:0", "all:1"])
def test_wrong_faults_are_errors(at):
    with pytest.raises(ValueError, match="is not like 'allreduce:3'"):
        hororing.testing.kill(rank=1, at=at)
    with pytest.raises(ValueError, match="there are ranks 0 to 1"):
        hororing.testing.slow(rank=2, ms=1)
    with pytest.raises(ValueError, match="number of milliseconds"):
        hororing.testing.slow(rank=1, ms=-1)


def test_faults_need_ranks():
    with pytest.raises(ValueError, match="no test on ranks"):
        hororing.testing.kill(rank=1, at="allreduce:1")


@pytest.mark.parametrize(
    ("arguments", "named", "text"),
    [
        ((), {}, "how many ranks"),
        ((0,), {}, "whole numbers from 1"),
        ((2, 2), {}, "twice"),
        ((2,), {"backend": "nccl"}, "backend='nccl'"),
        ((2,), {"limit": 3}, "no argument 'limit'"),
        ((2,), {"limit_s": "3"}, "limit_s='3'"),
        ((2,), {"init": 1}, "init=1"),
        ((2,), {"backend": "gloo", "elastic": True}, "no elastic jobs"),
    ],
)
def test_wrong_arguments_of_the_mark_are_named(arguments, named, text):
    with pytest.raises(pytest.fail.Exception, match=text):
        mark.wish_of(pytest.mark.ranks(*arguments, **named).mark)


def test_pytest_without_the_mark_imports_nothing_of_it():
    names = "sorted(each for each in sys.modules if 'hororing' in each)"
    program = f"import sys; import hororing.testing.plugin; print({names})"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert eval(found.stdout) == [
        "hororing", "hororing.testing", "hororing.testing.mark", "hororing.testing.plugin",
    ]  # fmt: skip
