"""The number of ranks that share the statistics of batch normalization: pure arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hororing.toolkit.large_batch import groups
from hororing.toolkit.large_batch.groups import group_size_for


@pytest.mark.parametrize(
    ("batch_size", "ranks_on", "target", "wanted"),
    [
        (12, [8, 8], 32, 4),  # 3 would be enough, but crosses hosts
        (20, [8, 8], 32, 2),
        (32, [8, 8], 32, 1),
        (4, [8, 8], 32, 8),
        (3, [8, 8], 32, 16),  # one host is not enough
        (3, [4, 4, 4, 4, 4, 4], 32, 12),
        (1, [8, 8], 32, 16),  # all ranks are not enough
        (12, [6, 4], 32, 10),  # parts of 2 fit both hosts, and 4 of those do not divide 10
        (12, [6, 6], 32, 3),
        (16, [6, 4], 32, 2),
        (16, [3, 4], 32, 7),
        (1, [1], 32, 1),
        (10, [5], 100, 5),
    ],
)
def test_group_sizes(batch_size: int, ranks_on: list[int], target: int, wanted: int) -> None:
    hosts = [host for host, ranks in enumerate(ranks_on) for _ in range(ranks)]
    assert group_size_for(batch_size, hosts, target) == wanted


def test_ranks_dealt_round_robin_share_a_host_with_nobody_near() -> None:
    assert group_size_for(16, [0, 1] * 4) == 2
    assert group_size_for(16, [0, 0, 1, 1] * 2) == 2


@given(st.integers(1, 40), st.lists(st.integers(1, 8), min_size=1, max_size=5), st.integers(1, 64))
def test_groups_divide_the_ranks_and_are_no_larger_than_needed(
    batch_size: int, ranks_on: list[int], target: int
) -> None:
    hosts = [host for host, ranks in enumerate(ranks_on) for _ in range(ranks)]
    size = group_size_for(batch_size, hosts, target)
    assert len(hosts) % size == 0
    inside = [g for g in range(1, 9) if all(ranks % g == 0 for ranks in ranks_on)]
    enough = [g for g in inside if g * batch_size >= target]
    if enough:
        assert size == enough[0]
    else:
        assert size == len(hosts) or size * batch_size >= target


def test_wrong_arguments() -> None:
    for bad in ((0, [0], 32), (1, [], 32), (1, [0], 0)):
        with pytest.raises(ValueError, match=r"group_size_for: .* must be at least 1"):
            group_size_for(*bad)


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ([("a", 0, 2), ("a", 1, 2), ("b", 0, 1)], [0, 0, 1]),
        ([("a", 0, 2), ("a", 1, 2), ("a", 0, 2), ("a", 1, 2)], [0, 0, 1, 1]),  # equal names
        ([("a", 0, 2), ("a", 0, 2), ("a", 1, 2), ("a", 1, 2)], [0, 1, 0, 1]),
        ([("a", 0, 1), ("a", 0, 2), ("a", 1, 2)], [0, 1, 1]),
    ],
)
def test_hosts_of_ranks(told: list[tuple[str, int, int]], wanted: list[int]) -> None:
    hosts = groups._hosts(told)
    assert [list(dict.fromkeys(hosts)).index(host) for host in hosts] == wanted
