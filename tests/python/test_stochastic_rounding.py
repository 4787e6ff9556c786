"""Stochastic rounding of NumPy arrays: hororing.large_batch.stochastic_rounding."""

from __future__ import annotations

import mpirun
import numpy as np
import pytest

from hororing.large_batch.stochastic_rounding import (
    rank_stream,
    round_stochastically,
    shared_seed,
)

ml_dtypes = pytest.importorskip("ml_dtypes")


def test_results_are_one_of_the_two_neighbours():
    random = np.random.default_rng(3)
    values = random.normal(size=(7, 1001)).astype(np.float32)
    for dtype in ("float16", "bfloat16"):
        rounded = round_stochastically(values, dtype, seed=5)
        assert rounded.shape == values.shape
        assert rounded.dtype.name == dtype
        down, up = (
            np.nextafter(rounded, np.asarray(limit, rounded.dtype)).astype(np.float32)
            for limit in (-np.inf, np.inf)
        )
        assert ((down < values) & (values < up)).all()
        assert (rounded.astype(np.float32) != values.astype(rounded.dtype)).any()  # not to nearest


def test_a_part_is_rounded_as_within_the_whole():
    values = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    whole = round_stochastically(values, seed=2, tensor=3, step=4)
    part = round_stochastically(values[333:777], seed=2, tensor=3, step=4, first=333)
    np.testing.assert_array_equal(part, whole[333:777])
    strided = round_stochastically(values[::2], seed=2)
    np.testing.assert_array_equal(strided, round_stochastically(values[::2].copy(), seed=2))


def test_random_numbers_depend_on_seed_tensor_step_and_stream():
    values = np.full(1000, 1.001, np.float32)
    base = {"seed": 1, "tensor": 2, "step": 3, "stream": 0}
    result = round_stochastically(values, **base)
    np.testing.assert_array_equal(result, round_stochastically(values, **base))
    for name in base:
        assert (round_stochastically(values, **{**base, name: 9}) != result).any(), name


def test_infinities_and_not_a_number_stay():
    values = np.array([np.inf, -np.inf, np.nan, -0.0], np.float32)
    for dtype in ("float16", np.dtype(ml_dtypes.bfloat16)):
        rounded = round_stochastically(values, dtype, seed=1).astype(np.float32)
        np.testing.assert_array_equal(rounded, values)
        assert np.signbit(rounded[3])


def test_refusals_say_what_is_possible():
    values = np.ones(3, np.float32)
    with pytest.raises(ValueError, match="float16 or bfloat16, not to float32"):
        round_stochastically(values, "float32", seed=1)
    with pytest.raises(TypeError, match="float32 arrays, not float64"):
        round_stochastically(np.ones(3), seed=1)
    for seed in (-1, 2**64, 1.5, True):
        with pytest.raises(ValueError, match="must be an integer from 0"):
            round_stochastically(values, seed=seed)


# -- on several ranks ----------------------------------------------------------------------------


def case_ranks_share_a_seed_and_have_streams_of_their_own():
    import hororing.numpy as hvd

    hvd.init()
    for mine in (None, 100 + hvd.rank()):
        seed = shared_seed(mine)
        assert len(set(hvd.allgather_object(seed))) == 1
        assert mine is None or seed == 100
    values = np.full(1000, 1.001, np.float32)
    same = hvd.allgather_object(round_stochastically(values, seed=seed).tobytes())
    assert len(set(same)) == 1
    own = round_stochastically(values, seed=seed, stream=rank_stream()).tobytes()
    assert len({*hvd.allgather_object(own), same[0]}) == hvd.size() + 1


@pytest.mark.parametrize("case", mpirun.case_names(globals()))
def test_case(case: str):
    mpirun.cases_of(__file__, 2).check(case)
