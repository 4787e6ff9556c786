"""Buckets of gradients: the plan is optimal, and planning is fast."""

from __future__ import annotations

import itertools
import os
import random
import time

import numpy as np
import pytest

from hororing.torch._optimizer.bucket_planning import (
    Cost,
    finish_planned,
    finish_unplanned,
    fit_cost,
    plan_buckets,
    propose,
)

SEED = int(os.environ.get("TEST_SEED", random.randrange(2**32)))


def random_step(draw: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, Cost]:
    gaps_s = draw.integers(0, 1000, count) * (draw.random(count) > 0.25) * 1e-6
    sizes = draw.integers(0, 4_000_000, count)
    cost = Cost(float(draw.integers(0, 4000)) * 1e-6, float(draw.integers(0, 1000)) * 1e-12)
    return np.cumsum(gaps_s), sizes, cost


def all_plans(count: int) -> list[list[int]]:
    inner = range(1, count)
    cuts = (itertools.combinations(inner, number) for number in range(count))
    return [[*cut, count] for cut in itertools.chain.from_iterable(cuts)]


def test_no_plan_of_random_steps_finishes_earlier() -> None:
    draw = np.random.default_rng(SEED)
    for _ in range(150):
        ready_s, sizes, cost = random_step(draw, int(draw.integers(1, 11)))
        ends = plan_buckets(ready_s, sizes, cost)
        assert ends == sorted(set(ends)), SEED
        assert ends[-1] == len(sizes)
        best_s = min(finish_planned(ready_s, sizes, p, cost) for p in all_plans(len(sizes)))
        planned_s = finish_planned(ready_s, sizes, ends, cost)
        assert planned_s == pytest.approx(best_s, rel=1e-12), SEED
        assert planned_s <= finish_unplanned(ready_s, sizes, cost) * (1 + 1e-12), SEED


@pytest.mark.parametrize(("gap_s", "ends"), [(0.9e-3, [2]), (1.1e-3, [1, 2])])
def test_the_second_of_two_is_waited_for_if_it_comes_within_alpha(gap_s, ends) -> None:
    """Separately they end at 2 alpha + 2 beta m, together at gap + alpha + 2 beta m."""
    ready_s, sizes = np.array([0, gap_s]), np.array([1_000_000, 1_000_000])
    assert plan_buckets(ready_s, sizes, Cost(1e-3, 2e-9)) == ends


def test_what_is_ready_at_once_goes_in_one_bucket_and_nothing_waits_for_free() -> None:
    sizes = np.full(100, 1000)
    assert plan_buckets(np.full(100, 0.5), sizes, Cost(1e-3, 1e-9)) == [100]
    assert len(plan_buckets(np.arange(100.0), sizes, Cost(0.0, 1e-6))) == 100
    assert plan_buckets(np.zeros(0), np.zeros(0), Cost(1e-3, 1e-9)) == []


def test_without_a_plan_a_message_takes_what_is_ready_when_it_begins() -> None:
    ready_s, sizes = np.array([0, 2, 4, 30, 32, 34]) * 1e-3, np.ones(6)
    # The first takes from 0 to 11, the next two to 23, the fourth from 30 to 41, the rest to 53.
    assert finish_unplanned(ready_s, sizes, Cost(10e-3, 1e-3)) == pytest.approx(53e-3)


def test_gradients_come_in_any_order_and_those_that_are_never_ready_are_in_no_bucket() -> None:
    ready_s = np.array([34, 4, np.inf, 0, 30, 2, np.inf, 32]) * 1e-3
    found = propose(ready_s, np.ones(8), Cost(10e-3, 1e-3))
    assert found.buckets.tolist() == [1, 0, -1, 0, 1, 0, -1, 1]
    assert (found.before_s, found.after_s) == (pytest.approx(53e-3), pytest.approx(47e-3))
    nothing = propose(np.full(3, np.inf), np.ones(3), Cost(1.0, 1.0))
    assert nothing.buckets.tolist() == [-1] * 3


def test_there_are_no_buckets_where_they_gain_nothing() -> None:
    found = propose(np.arange(10.0), np.ones(10), Cost(1e-5, 1e-6))
    assert found.buckets.tolist() == [-1] * 10
    assert found.before_s == found.after_s == pytest.approx(9 + 1.1e-5)


def test_costs_are_a_line_that_is_nowhere_negative() -> None:
    assert fit_cost((1000, 3e-3), (5000, 7e-3)) == pytest.approx((2e-3, 1e-6))
    assert fit_cost((1000, 3e-3), (5000, 2e-3)) == pytest.approx((3e-3, 0))  # noise
    assert fit_cost((1000, 1e-3), (5000, 7e-3)) == pytest.approx((0, 1.5e-6))


def test_a_thousand_gradients_are_planned_in_less_than_a_second() -> None:
    step = random_step(np.random.default_rng(SEED), 1000)
    begin = time.process_time()
    propose(*step)
    assert time.process_time() - begin < 1
