"""Schedules and presets of hororing.toolkit.large_batch: formulas, without a framework."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hororing.toolkit.large_batch.presets import GRAPHCORE_POD16, MLPERF, nearest
from hororing.toolkit.large_batch.schedules import (
    WarmupPolynomial,
    effective_batch,
    linear_scaled_rate,
    momentum_correction,
    steps_in,
)


def test_the_rate_grows_with_the_effective_batch():
    assert effective_batch(32, accumulation=4, replicas=8) == 1024
    assert effective_batch(7) == 7
    assert linear_scaled_rate(0.1, 8192) == 3.2
    assert linear_scaled_rate(0.1, 64) == 0.025
    for arguments in ((0,), (1, 0), (1, 1, 1.5)):
        with pytest.raises(ValueError, match="positive integer"):
            effective_batch(*arguments)


def test_warm_up_adds_a_constant_every_step_and_arrives_at_the_peak():
    # Goyal et al.: ResNet-50, batch 8192: from 0.1 to 3.2 in 5 epochs.
    schedule = WarmupPolynomial.for_batch(8192, samples=1_281_167, epochs=90, base_rate=0.1)
    assert (schedule.peak, schedule.start) == (3.2, 0.1)
    assert (schedule.warmup_steps, schedule.total_steps) == (5 * 156, 90 * 156)
    rates = [schedule(step) for step in range(schedule.warmup_steps + 1)]
    assert rates[0] == 0.1
    assert rates[-1] == 3.2
    for one, other in itertools.pairwise(rates):
        assert other - one == pytest.approx(3.1 / 780, rel=1e-9)


def test_the_decay_is_polynomial_in_both_forms():
    for form in ("shift", "mask"):
        schedule = WarmupPolynomial(
            peak=10.0, total_steps=100, warmup_steps=20, end=1.0, form=form, power=2
        )
        for step in range(20, 100):
            left = (100 - step) / 80 if form == "shift" else (100 - step) / 100
            assert schedule(step) == pytest.approx(1 + 9 * left**2, rel=1e-14)
        assert schedule(100) == schedule(1000) == 1.0
        assert [schedule(step) for step in (0, 10, 19)] == [0.0, 5.0, 9.5]
    assert schedule(20) == pytest.approx(1 + 9 * 0.64)  # the mask is lifted
    assert WarmupPolynomial(2.0, 10, power=1)(5) == 1.0
    assert WarmupPolynomial(2.0, 10, power=0)(9) == 2.0
    assert WarmupPolynomial(2.0, 10, warmup_steps=10)(9) == 1.8


@given(
    st.floats(0, 100), st.integers(1, 500), st.floats(0, 1), st.floats(0, 4),
    st.sampled_from(["shift", "mask"]),
)  # fmt: skip
def test_rates_stay_between_their_ends(peak, total, part, power, form):
    warmup = int(part * total)
    schedule = WarmupPolynomial(
        peak, total, warmup, start=peak / 3, end=0.0, power=power, form=form
    )
    rates = [schedule(step) for step in range(total + 2)]
    assert all(0 <= rate <= peak * (1 + 1e-12) for rate in rates)
    falling = rates[warmup:]
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(falling))


def test_wrong_schedules_are_refused():
    for options in (
        {"warmup_steps": 11}, {"form": "both"}, {"power": -1}, {"start": math.nan},
        {"end": math.inf}, {"total_steps": 0},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(options))):
            WarmupPolynomial(**{"peak": 1.0, "total_steps": 10, **options})
    with pytest.raises(ValueError, match="has no batch of 64"):
        steps_in(3, samples=50, batch=64)


def test_momentum_correction_makes_one_form_of_momentum_the_other():
    # v = m v + rate g; w -= v  against  u = m u + g; w -= rate u. Rates are powers of two, so there
    # are no roundings, and the bits are equal.
    v = u = 0.0
    w_scaled = w_unscaled = 1.0
    previous = 0.0
    for step in range(40):
        rate = 2.0 ** -(3 + step % 4)
        gradient = ((step * 7) % 11 - 5) / 8
        v *= momentum_correction(rate, previous)
        v, u = 0.5 * v + rate * gradient, 0.5 * u + gradient
        w_scaled, w_unscaled = w_scaled - v, w_unscaled - rate * u
        previous = rate
        assert w_scaled == w_unscaled
    assert momentum_correction(0.5, 0.0) == 1.0


def test_presets_are_the_published_points():
    assert list(MLPERF) == [1632, 3264, 4096, 8192, 13056, 32768, 49152, 58880, 65536]
    assert all(batch == preset.batch for batch, preset in MLPERF.items())
    point = MLPERF[32768]
    assert point.lars() == {
        "lr": 21.2, "momentum": 0.94, "weight_decay": 2.5e-5, "trust_coefficient": 0.001,
        "eps": 0.0,
    }  # fmt: skip
    schedule = point.schedule()
    assert (schedule.total_steps, schedule.warmup_steps) == (56 * 39, 16 * 39)
    assert max(schedule(step) for step in range(schedule.total_steps)) == 21.2
    assert MLPERF[13056].schedule().total_steps == 46 * 98
    assert MLPERF[13056].schedule(10**6, epochs=10).total_steps == 10 * 76
    assert GRAPHCORE_POD16.peak == pytest.approx(10.72, abs=1e-3)
    assert nearest(10_000).batch == 8192
    assert nearest(12_000).batch == 13056
    with pytest.raises(ValueError, match="batch=0"):
        nearest(0)
