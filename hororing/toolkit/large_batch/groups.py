"""Which ranks share the statistics of batch normalisation: groups of consecutive ranks.

A group of g ranks with b samples each normalises over g b. About 32 are enough (C. Ying et al.,
"Image classification at supercomputer scale", 2018, arXiv:1811.06992), and a group inside one host
talks through shared memory only.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

from hororing import job, process_sets
from hororing.objects import allgather_object
from hororing.process_sets import ProcessSet


def group_size_for(batch_size: int, hosts: Sequence[Hashable], target: int = 32) -> int:
    """Return how many consecutive ranks should share statistics.

    The smallest g with ``g * batch_size >= target`` such that groups lie inside hosts, that is
    which divides the number of ranks on each; where there is none, the smallest that divides the
    number of ranks and consists of whole such parts; where there is none either, all ranks.

    Parameters
    ----------
    batch_size : samples of a rank.
    hosts : what names the host of each rank, in rank order.
    target : samples of a group, at least.

    Examples
    --------
    >>> hosts = [0] * 8 + [1] * 8
    >>> group_size_for(12, hosts)  # 3 would do, but would cross hosts
    4
    >>> group_size_for(20, hosts), group_size_for(3, hosts), group_size_for(32, hosts)
    (2, 16, 1)
    """
    if batch_size < 1 or target < 1 or not hosts:
        raise ValueError(
            f"group_size_for: batch_size={batch_size}, target={target}, {len(hosts)} ranks: must "
            "be at least 1"
        )
    inside = math.gcd(*(len(list(ranks)) for _, ranks in groupby(hosts)))
    sizes = [
        *(g for g in range(1, inside + 1) if inside % g == 0),
        *(g for g in range(inside, len(hosts) + 1, inside) if len(hosts) % g == 0),
    ]
    return next((g for g in sizes if g * batch_size >= target), len(hosts))


@dataclass(frozen=True)
class TargetBatch:
    """Stands for a group size: as few ranks as have `samples` together (see `group_size_for`).

    Attributes
    ----------
    batch_size : samples of a rank in a step; the same on all ranks.
    samples : of a group, at least.
    """

    batch_size: int
    samples: int = 32


def check(group_size: int | TargetBatch, process_set: ProcessSet, title: str) -> int:
    """Return the size of groups of consecutive ranks of a set.

    For a `TargetBatch` all ranks of the job must call this, members or not: they tell each other
    on which hosts they are.

    Raises
    ------
    ValueError : when it does not divide the set; on every rank, when `TargetBatch`es differ.
    """
    job.topology()
    ranks = process_set.ranks
    if isinstance(group_size, TargetBatch):
        hosts, asked = _hosts(group_size)
        if any(each != group_size for each in asked):
            raise ValueError(
                f"{title}: ranks differ in group_size: "
                + "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(asked))
                + ". Pass the same on every rank"
            )
        here = [hosts[rank] for rank in ranks]
        return group_size_for(group_size.batch_size, here, group_size.samples)
    if type(group_size) is not int or group_size < 1 or len(ranks) % group_size:
        raise ValueError(
            f"{title}: group_size={group_size!r} does not divide the "
            f"{len(ranks)} ranks of its process set; use one of "
            f"{[n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0]}"
        )
    return group_size


def register(group_size: int, process_set: ProcessSet) -> ProcessSet | None:
    """Make process sets of the groups, and return this rank's.

    None for a rank that is in none of them, or alone. All ranks of the job must call this.
    """
    mine = None
    if group_size > 1:
        for first in range(0, len(process_set.ranks), group_size):
            group = process_sets.obtain(process_set.ranks[first : first + group_size])
            if group.included():
                mine = group
    return mine


def _hosts(asked: TargetBatch) -> tuple[list[Hashable], list[TargetBatch]]:
    """Name the host of each rank of the job, and tell what each has asked for.

    By what is the same for all ranks of a host: its name; and for hosts that have one name, what
    distinguishes the ranks of one host, the local rank.
    """
    topology = job.topology()
    mine = (socket.gethostname(), topology.local_rank, topology.local_size)
    everybody = allgather_object((mine, asked), "large_batch.hosts")
    hosts: list[Hashable] = []
    taken: dict[tuple[str, int], list[set[int]]] = {}
    for (name, local_rank, local_size), _ in everybody:
        namesakes = taken.setdefault((name, local_size), [])
        number = next((n for n, used in enumerate(namesakes) if local_rank not in used), None)
        if number is None:
            number = len(namesakes)
            namesakes.append(set())
        namesakes[number].add(local_rank)
        hosts.append((name, local_size, number))
    return hosts, [theirs for _, theirs in everybody]
