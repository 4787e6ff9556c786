"""Hierarchical SGD: which ranks average their weights, and after which steps.

Pure: nothing here communicates or knows a framework. Sources: Stich 2018 (arXiv:1805.09767, local
SGD), Lin et al. 2018 (arXiv:1808.07217, post-local SGD), Wang et al. 2020 (arXiv:2010.12998,
hierarchical SGD).

The clock counts optimizer steps that are done: 1 after the first. Steps 1 .. W, the warm-up, are
synchronous. Then step W + t ends with an average of the level with the largest period that divides
t, if there is one:

    W = 2, levels of period 2 and 4     step   1 2 | 3 4 5 6 7 8 9 10
                                        level      |   2   4   2    4

So a period is a number of steps between averages, from the first on. torch counts from 0 instead:
its PeriodicModelAverager averages after the first local step and then every period steps, and its
HierarchicalModelAverager does not subtract the warm-up.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Groups = tuple[tuple[int, ...], ...]  # every rank in one of them; ranks ascend within a group
ARGUMENT = "period_group_size_dict"


class Level(NamedTuple):
    """Groups of ranks that average every `period` local steps."""

    period: int
    groups: Groups


@dataclass(frozen=True)
class Hierarchy:
    """Levels with ascending periods; the last one has one group.

    Invariants: a period divides the next one; each group lies within one group of the next level.
    So a rank that averages in a level has not missed an average of a lower one.
    """

    levels: tuple[Level, ...]
    warmup_steps: int = 0

    def is_local(self, steps: int) -> bool:
        """Whether the step after `steps` steps is a local one, after the warm-up."""
        return steps >= self.warmup_steps

    def level_after(self, steps: int) -> int | None:
        """Return the level that averages when `steps` steps are done, or None."""
        local = steps - self.warmup_steps
        if local <= 0:
            return None
        due = [at for at, level in enumerate(self.levels) if local % level.period == 0]
        return due[-1] if due else None


def make_hierarchy(
    period_group_size_dict: Mapping[int, Any], warmup_steps: int, hosts: Sequence[Any]
) -> Hierarchy:
    """Check what a user asks for, and return it.

    Parameters
    ----------
    period_group_size_dict : dict
        From periods, ascending, to groups as `make_groups` takes them.
    warmup_steps : int
        Synchronous steps in the beginning.
    hosts : sequence
        The host of each rank, by rank: anything that can be compared.

    Raises
    ------
    TypeError, ValueError : with the level that is wrong.
    """
    if not isinstance(period_group_size_dict, Mapping):
        raise TypeError(
            f"{ARGUMENT} must be a dict from periods to group sizes, not "
            f"{type(period_group_size_dict).__name__}"
        )
    if not period_group_size_dict:
        raise ValueError(f"{ARGUMENT} is empty; local SGD with period 8 is {{8: 'world'}}")
    warmup_steps = checked_count("warmup_steps", warmup_steps, least=0)
    levels: list[Level] = []
    for number, (period, groups) in enumerate(period_group_size_dict.items(), 1):
        where = f"{ARGUMENT}: level {number} (period {period!r})"
        level = Level(
            checked_count(f"{where}: the period", period), make_groups(where, groups, hosts)
        )
        if levels:
            _check_above(where, level, levels[-1])
        levels.append(level)
    if len(levels[-1].groups) > 1:
        raise ValueError(
            f"{where}: the last level must average all {len(hosts)} ranks, or they drift apart; it "
            f"has {len(levels[-1].groups)} groups. Add a level with 'world', for example "
            f"{{..., {4 * levels[-1].period}: 'world'}}"
        )
    return Hierarchy(tuple(levels), warmup_steps)


def make_groups(where: str, groups: Any, hosts: Sequence[Any]) -> Groups:
    """Return groups of all ranks.

    `groups` is a number of consecutive ranks, which divides their number; "host": one group per
    host, which may differ in size; "world": one group; or lists of ranks.
    """
    size = len(hosts)
    if groups == "world":
        return (tuple(range(size)),)
    if groups == "host":
        by_host: dict[Any, list[int]] = {}
        for rank, host in enumerate(hosts):
            by_host.setdefault(host, []).append(rank)
        return tuple(map(tuple, by_host.values()))
    if isinstance(groups, str):
        raise ValueError(f"{where}: {groups!r} is neither 'host' nor 'world'")
    if isinstance(groups, Sequence):
        return _checked_lists(where, groups, size)
    group_size = checked_count(f"{where}: the group size", groups)
    if size % group_size:
        raise ValueError(
            f"{where}: groups of {group_size} ranks do not divide {size} ranks; use a divisor, "
            "'host', or lists of ranks"
        )
    return tuple(tuple(range(first, first + group_size)) for first in range(0, size, group_size))


def _checked_lists(where: str, groups: Sequence[Any], size: int) -> Groups:
    result = []
    home: dict[int, int] = {}  # of each rank
    for number, group in enumerate(groups):
        if not isinstance(group, Sequence) or isinstance(group, str) or not group:
            raise ValueError(f"{where}: group {number} must be a list of ranks, not {group!r}")
        ranks = [checked_count(f"{where}: a rank of group {number}", each, 0) for each in group]
        for rank in ranks:
            if rank >= size:
                raise ValueError(
                    f"{where}: group {number} has rank {rank}; there are {size} ranks, 0 .. "
                    f"{size - 1}"
                )
            if rank in home:
                raise ValueError(
                    f"{where}: rank {rank} is in group {home[rank]} and in group {number}"
                )
            home[rank] = number
        result.append(tuple(sorted(ranks)))
    missing = [rank for rank in range(size) if rank not in home]
    if missing:
        raise ValueError(f"{where}: ranks {missing} are in no group; every rank needs one")
    return tuple(result)


def _check_above(where: str, level: Level, below: Level) -> None:
    if level.period <= below.period:
        raise ValueError(
            f"{where}: periods must ascend, and the one before is {below.period}; larger groups "
            "average less often"
        )
    if level.period % below.period:
        raise ValueError(
            f"{where}: the period is not a multiple of the previous one, {below.period}; levels "
            f"would not meet. Use {level.period - level.period % below.period} or "
            f"{level.period - level.period % below.period + below.period}"
        )
    home = {rank: group for group in level.groups for rank in group}
    for group in below.groups:
        split = [rank for rank in group if home[rank] != home[group[0]]]
        if split:
            raise ValueError(
                f"{where}: groups must hold whole groups of the level before (period "
                f"{below.period}); its group {list(group)} is split: ranks {group[0]} and "
                f"{split[0]} are apart here"
            )


def checked_count(what: str, value: Any, least: int = 1) -> int:
    """Return `value` if it is an integer of at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{what} must be an int, not {type(value).__name__} ({value!r})")
    if number < least:
        raise ValueError(f"{what} must be at least {least}, not {number}")
    return number


def group_of(groups: Groups, rank: int) -> tuple[int, ...]:
    """Return the group that `rank` is in."""
    return next(group for group in groups if rank in group)


def shares(weights: Sequence[float], group: Sequence[int]) -> dict[int, float]:
    """Return each rank's weight in a weighted average over `group`: n_i over their sum."""
    total = sum(weights[rank] for rank in group)
    return {rank: weights[rank] / total for rank in group}
