"""HORORING_VERIFY: ranks that have received different sums hear of it, with the tensor and rank.

A job of 4 ranks: push tier, 2 s.
"""

from __future__ import annotations

import threading

import mpirun
import numpy as np
import pytest

import hororing.numpy as hvd
from hororing.errors import TransportError

ELEMENTS = 4 << 20  # so large that a thread writes between the sum and the checksum


def case_equal_results_pass() -> None:
    hvd.init()
    for number in range(4):  # of which some batches are verified
        handles = [hvd.allreduce_async(np.ones(9), name=f"{number}.{at}") for at in range(3)]
        assert [hvd.synchronize(handle)[0] for handle in handles] == [1, 1, 1]
        numbers = np.random.default_rng(hvd.rank()).standard_normal(1000)
        hvd.allreduce(numbers, name="adasum", op=hvd.Adasum)
        hvd.allreduce(numbers[:1], name="small")
    assert hvd.statistics()["allreduces_at_once"] == 0  # these cannot be verified


def case_another_result_names_the_tensor_and_the_rank() -> None:
    array, ended = np.ones(ELEMENTS, np.float32), threading.Event()

    def spoil() -> None:
        while not ended.is_set():
            array[:16] = 7.0

    thread = threading.Thread(target=spoil)
    if hvd.rank() == 1:
        thread.start()
    try:
        with pytest.raises(TransportError, match=r"allreduce 'large'.* rank 1 unlike most"):
            reduce_often(array)
    finally:
        ended.set()


def reduce_often(array: np.ndarray) -> None:
    for _ in range(50):
        hvd.allreduce_(array, name="large", op=hvd.Min)
        array[:16] = 1.0


@pytest.mark.parametrize("case", mpirun.case_names(globals()))
def test_verify(case: str) -> None:
    mpirun.cases_of(__file__, 4, HORORING_VERIFY="2").check(case)
