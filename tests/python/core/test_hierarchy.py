"""Clock, levels and outer optimizers of hierarchical SGD: pure arithmetic."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hororing.toolkit.large_batch.hierarchy import Hierarchy, make_groups, make_hierarchy, shares
from hororing.toolkit.large_batch.outer import OuterSGD, SlowMo

EIGHT = ["a"] * 8
HOSTS = ["a", "b", "a", "c", "b", "a"]  # three, two and one rank, in no order


def log(hierarchy: Hierarchy, steps: int) -> list[tuple[int, int]]:
    """Return (step, period) of every average."""
    levels = [(step, hierarchy.level_after(step)) for step in range(1, steps + 1)]
    return [(step, hierarchy.levels[at].period) for step, at in levels if at is not None]


def test_levels_fire_when_their_period_of_local_steps_is_over():
    hierarchy = make_hierarchy(OrderedDict([(2, 4), (4, 8)]), 2, EIGHT)
    assert log(hierarchy, 11) == [(4, 2), (6, 4), (8, 2), (10, 4)]
    assert [hierarchy.is_local(steps) for steps in range(4)] == [False, False, True, True]
    assert log(make_hierarchy({3: "world"}, 0, EIGHT), 7) == [(3, 3), (6, 3)]
    assert log(make_hierarchy({1: 2, 2: 8}, 0, EIGHT), 3) == [(1, 1), (2, 2), (3, 1)]


@st.composite
def hierarchies(draw):
    """Draw periods and nested contiguous groups, for any number of ranks."""
    factors = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    periods = np.cumprod([draw(st.integers(1, 4)), *[draw(st.integers(2, 3)) for _ in factors[1:]]])
    groups = np.cumprod(factors)
    size = int(groups[-1])
    wanted = dict(zip(map(int, periods), map(int, groups), strict=True))
    return make_hierarchy(wanted, draw(st.integers(0, 5)), ["a"] * size), size


@given(hierarchies(), st.integers(1, 200))
def test_the_largest_period_that_divides_wins_and_covers_the_lower_ones(made, steps: int):
    hierarchy, size = made
    level = hierarchy.level_after(steps)
    local = steps - hierarchy.warmup_steps
    due = [at.period for at in hierarchy.levels if local > 0 and local % at.period == 0]
    assert (level is None) == (not due)
    if level is not None:
        assert hierarchy.levels[level].period == max(due)
    for below, above in zip(hierarchy.levels, hierarchy.levels[1:], strict=False):
        for group in below.groups:
            assert any(set(group) <= set(larger) for larger in above.groups)
        assert sorted(sum(below.groups, ())) == list(range(size))


def test_groups_follow_the_hosts_however_uneven():
    hierarchy = make_hierarchy({2: "host", 4: "world"}, 0, HOSTS)
    assert hierarchy.levels[0].groups == ((0, 2, 5), (1, 4), (3,))
    assert hierarchy.levels[1].groups == ((0, 1, 2, 3, 4, 5),)
    lists = make_groups("here", [[5, 0, 2], (4, 1), [3]], HOSTS)
    assert lists == hierarchy.levels[0].groups


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({}, "period_group_size_dict is empty"),
        ([(2, 4)], "must be a dict"),
        ({2: 3, 4: 8}, r"level 1 \(period 2\): groups of 3 ranks do not divide 8"),
        ({0: 2, 4: 8}, r"level 1 \(period 0\): the period must be at least 1"),
        ({2.0: 2, 4: 8}, r"level 1 \(period 2.0\): the period must be an int"),
        ({2: 2, 4: True}, r"level 2 \(period 4\): the group size must be an int"),
        ({4: 2, 2: 8}, r"level 2 \(period 2\): periods must ascend"),
        ({4: 2, 6: 8}, r"level 2 \(period 6\): .*not a multiple of the previous one, 4.* 4 or 8"),
        ({2: 4, 4: 2, 8: 8}, r"level 2 \(period 4\): .*\[0, 1, 2, 3\] is split: ranks 0 and 2"),
        ({2: 2, 4: 4}, r"level 2 \(period 4\): the last level must average all 8 ranks"),
        ({2: "node"}, "neither 'host' nor 'world'"),
        ({2: [[0, 1]]}, r"ranks \[2, 3, 4, 5, 6, 7\] are in no group"),
        ({2: [[0, 1, 2, 3], [3, 4, 5, 6, 7]]}, "rank 3 is in group 0 and in group 1"),
        ({2: [[0, 8]]}, "group 0 has rank 8; there are 8 ranks"),
        ({2: [[0], 3]}, "group 1 must be a list of ranks"),
        ({2: [[0, 4], [1, 2, 3, 5, 6, 7]], 4: 4, 8: 8}, r"level 2 .*\[0, 4\] is split"),
    ],
)
def test_errors_name_the_level(wanted, text: str):
    with pytest.raises((TypeError, ValueError), match=text):
        make_hierarchy(wanted, 0, EIGHT)


@pytest.mark.parametrize("steps", [-1, 1.5, None])
def test_warm_up_is_a_count(steps):
    with pytest.raises((TypeError, ValueError), match="warmup_steps must be"):
        make_hierarchy({2: "world"}, steps, EIGHT)


def test_shares_are_a_part_of_one():
    assert shares([1.0, 5.0, 3.0], [0, 2]) == {0: 0.25, 2: 0.75}


@given(st.floats(0.01, 1.0), st.integers(0, 2**32 - 1))
def test_outer_optimizers_without_momentum_are_local_sgd(lr: float, seed: int):
    previous, mean, zero = *np.random.default_rng(seed).normal(size=(2, 3)), np.zeros(3)
    for outer in (SlowMo(alpha=1.0, beta=0.0), OuterSGD(lr=1.0, momentum=0.0)):
        np.testing.assert_allclose(outer.update(previous, mean, zero, lr)[0], mean, atol=1e-14)


def test_outer_sgd_is_that_of_torch():
    torch = pytest.importorskip("torch")
    for nesterov in (True, False):
        param = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        theirs = torch.optim.SGD([param], lr=0.7, momentum=0.9, nesterov=nesterov)
        ours, previous, momentum = OuterSGD(nesterov=nesterov), param.detach().numpy().copy(), 0.0
        for step in range(5):
            mean = previous + np.random.default_rng(step).normal(size=2)
            param.grad = param.detach() - torch.tensor(mean)
            theirs.step()
            previous, momentum = ours.update(previous, mean, momentum, 0.1)
            np.testing.assert_allclose(previous, param.detach().numpy(), rtol=1e-12)


def test_slow_momentum_survives_a_learning_rate_of_zero():
    mean, momentum = SlowMo().update(1.0, 3.0, 0.25, 0.0)
    assert (mean, momentum) == (3.0, 0.25)


@pytest.mark.parametrize(
    "make", [lambda: SlowMo(alpha=0), lambda: SlowMo(beta=1), lambda: OuterSGD(lr=-1)]
)
def test_outer_optimizers_check_their_numbers(make):
    with pytest.raises(ValueError, match="must be"):
        make()
