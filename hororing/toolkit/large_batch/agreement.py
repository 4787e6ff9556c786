"""Options of hierarchical SGD on which ranks must agree, compared when an optimizer is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hororing.numpy as hvd
from hororing.extension import obtain
from hororing.toolkit.large_batch.hierarchy import Groups, group_of


def agreed(what: str, describe: Callable[[], dict[str, Any]], **own: Any) -> list[dict[str, Any]]:
    """Call `describe` on every rank; return `own` of each, by rank. All ranks call it.

    Raises
    ------
    ValueError : on every rank, when `describe` raises on some (there what it raises), or when its
        results differ.
    """
    failure: Exception | None = None
    mine: dict[str, Any] = {}
    try:
        mine = describe()
    except (TypeError, ValueError) as error:
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    by_rank = hvd.allgather_object((text, mine, own), f"{what}.options")
    if failure is not None:
        raise failure
    for rank, (text, _, _) in enumerate(by_rank):
        if text is not None:
            raise ValueError(f"{what}: rank {rank} has failed: {text}")
    for option in mine:
        values = [options.get(option) for _, options, _ in by_rank]
        if any(value != values[0] for value in values):
            ranks: dict[str, list[int]] = {}
            for rank, value in enumerate(values):
                ranks.setdefault(repr(value), []).append(rank)
            raise ValueError(
                f"{what}: ranks differ in {option}: "
                + "; ".join(f"ranks {where}: {value}" for value, where in ranks.items())
                + ". Pass the same on every rank"
            )
    return [theirs for _, _, theirs in by_rank]


def obtain_groups(groups: Groups) -> hvd.ProcessSet:
    """Register process sets for all groups, and return that of this rank. All ranks call it."""
    sets = {group: obtain(group) for group in groups if len(group) > 1}
    mine = group_of(groups, hvd.rank())
    return sets.get(mine) or hvd.ProcessSet(mine)
