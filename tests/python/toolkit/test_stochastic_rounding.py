"""Stochastic rounding in torch's operations; ranks share seeds and streams."""

from __future__ import annotations

import numpy as np
import pytest
import session

pytest.importorskip("ml_dtypes")
torch = pytest.importorskip("torch")

import rounding_oracle as oracle  # noqa: E402

from hororing.toolkit.large_batch.stochastic_rounding import rank_stream, shared_seed  # noqa: E402
from hororing.toolkit.torch.optim import round_into  # noqa: E402

TYPES = ("float16", "bfloat16")
SEED = 12345  # a constant, so that random tests always or never fail
WHERE = {"seed": 2**60 + 5, "tensor": 3, "step": 2**33 + 1, "stream": 2}


def rounded(values, dtype="bfloat16", **where):
    """Return an array of `dtype` for the array `values`."""
    source = torch.from_numpy(values)
    result = torch.empty_like(source, dtype=getattr(torch, dtype))
    round_into(result, source, **where)
    return result.view(torch.int16).numpy().view(oracle.TYPES[dtype])


@pytest.mark.parametrize("dtype", TYPES)
def test_results_are_those_of_the_oracle_to_the_last_bit(dtype):
    for count in (0, 1, 2, 4999, 2**18 + 4999):  # the last in two pieces
        values = oracle.patterns(count, count)
        result = rounded(values, dtype, **WHERE)
        oracle.assert_rounded(result, values, dtype, oracle.random_numbers(count, **WHERE))


@pytest.mark.parametrize("dtype", TYPES)
def test_shapes_and_strides_do_not_count(dtype):
    flat = oracle.patterns(6 * 50 * 7, 1)
    expected = rounded(flat, dtype, **WHERE).reshape(6, 50, 7).astype(np.float32)
    strided = torch.empty(7, 6, 50, dtype=getattr(torch, dtype)).permute(1, 2, 0)
    source = torch.from_numpy(flat).view(6, 50, 7).permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert not source.is_contiguous()
    round_into(strided, source, **WHERE)
    np.testing.assert_array_equal(strided.float().numpy(), expected)
    scalar = torch.empty((), dtype=getattr(torch, dtype))
    round_into(scalar, source[5, 4, 3], **WHERE)
    assert scalar.shape == ()


@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_of_the_target_type_are_kept(dtype):
    values, patterns = oracle.kept(dtype)
    np.testing.assert_array_equal(rounded(values, dtype, seed=7).view(np.uint16), patterns)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_mean_of_many_roundings_is_the_number(dtype):
    for value in oracle.VALUES:
        values = np.full(oracle.TIMES, value, np.float32)
        oracle.assert_mean(rounded(values, dtype, seed=SEED), value)
    # Also for one element over many steps, and over many tensors.
    for name in ("step", "tensor"):
        alone = np.full(1, 1.003, np.float32)
        every = [rounded(alone, dtype, seed=SEED, **{name: at}) for at in range(4000)]
        oracle.assert_mean(np.concatenate(every), 1.003)


def test_random_numbers_are_uniform_and_independent():
    # Tests the oracle's numbers, which torch computes, too.
    count = 2**17
    base = {"seed": 1, "tensor": 2, "step": 3, "stream": 0}

    def numbers(**where):
        return oracle.random_numbers(count, **{**base, **where}).astype(np.float64)

    first = numbers()
    # Chi-square of 256 bins: mean 255, deviation sqrt(2 * 255).
    hits = np.bincount((first / 256).astype(int), minlength=256)
    chi = ((hits - count / 256) ** 2 / (count / 256)).sum()
    assert abs(chi - 255) < 5 * np.sqrt(2 * 255)
    others = [numbers(**{name: base[name] + 1}) for name in base]
    others += [np.roll(first, lag) for lag in (1, 2, 3, count // 2)]
    others += [numbers(step=step) for step in (4, 11, 3 + 4181)]
    for other in others:
        # The deviation of the correlation of this many independent pairs.
        assert abs(np.corrcoef(first, other)[0, 1]) < 5 / np.sqrt(count)


def test_results_depend_on_seed_tensor_step_and_stream():
    values = np.full(1000, 1.001, np.float32)
    base = {"seed": 1, "tensor": 2, "step": 3, "stream": 0}
    result = rounded(values, **base)
    np.testing.assert_array_equal(result, rounded(values, **base))
    for name in base:
        assert (rounded(values, **{**base, name: 9}) != result).any(), name


def test_refusals_say_what_is_possible():
    values = torch.ones(3)
    short = torch.ones(3, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"float16 or bfloat16, not to torch\.float32"):
        round_into(values, values, seed=1)
    with pytest.raises(TypeError, match=r"takes float32 .* not torch\.float64"):
        round_into(short, values.double(), seed=1)
    with pytest.raises(TypeError, match=r"shape \[3\].* shape \[1\]"):
        round_into(short, values[:1], seed=1)
    for seed in (-1, 2**64, 1.5, True):
        with pytest.raises(ValueError, match="must be an integer from 0"):
            round_into(short, values, seed=seed)


# -- on several ranks ----------------------------------------------------------------------------


def case_ranks_share_a_seed_and_have_streams_of_their_own():
    import hororing.numpy as hvd

    hvd.init()
    for mine in (None, 100 + hvd.rank()):
        seed = shared_seed(mine)
        assert len(set(hvd.allgather_object(seed))) == 1
        assert mine is None or seed == 100
    values = np.full(1000, 1.001, np.float32)
    same = hvd.allgather_object(rounded(values, seed=seed).tobytes())
    assert len(set(same)) == 1
    own = rounded(values, seed=seed, stream=rank_stream()).tobytes()
    assert len({*hvd.allgather_object(own), same[0]}) == hvd.size() + 1


test_case = session.on_ranks(globals(), 2, push=[2], session="torch")
