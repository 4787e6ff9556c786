"""Which ranks share the statistics of batch normalisation: groups of consecutive ranks.

A group of g ranks with b samples each normalises over g b. About 32 are enough (C. Ying et al.,
"Image classification at supercomputer scale", 2018, arXiv:1811.06992), and a group inside one host
needs shared memory only.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Hashable, Sequence
from itertools import groupby

import hororing.numpy as hvd
from hororing.extension import ProcessSet, global_process_set
from hororing.toolkit.large_batch.agreement import agreed


def group_size_for(batch_size: int, hosts: Sequence[Hashable], target: int = 32) -> int:
    """Return how many consecutive ranks should share statistics.

    The smallest g with ``g * batch_size >= target`` such that groups lie inside hosts, that is
    which divides the number of ranks on each; where there is none, the smallest that divides the
    number of ranks and consists of whole such parts; where there is none either, all ranks.

    Parameters
    ----------
    batch_size : int
        Samples of a rank.
    hosts : sequence of Hashable
        A key for the host of each rank, in rank order.
    target : int, optional
        Samples of a group, at least.

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


def choose_group_size(
    batch_size: int, samples: int = 32, *, process_set: ProcessSet = global_process_set
) -> int:
    """Return the `group_size` of SyncBatchNorm for as few ranks as have `samples` together.

    By `group_size_for`, from the hosts of the ranks of `process_set`. Collective, after `init()`:
    all ranks of the job call it with equal arguments, members of the set or not.

    Parameters
    ----------
    batch_size : int
        Samples of a rank in a step; the same on all ranks.
    samples : int, optional
        Of a group, at least.

    Raises
    ------
    ValueError : on every rank, when arguments differ.

    Examples
    --------
    >>> layer = hvd.SyncBatchNorm(64, group_size=choose_group_size(batch_size=8))
    """
    host = (socket.gethostname(), hvd.local_rank(), hvd.local_size())
    asked = {"batch_size": batch_size, "samples": samples}
    gathered = agreed("choose_group_size", lambda: asked, host=host)
    hosts = _hosts([each["host"] for each in gathered])
    return group_size_for(batch_size, [hosts[rank] for rank in process_set.ranks], samples)


def _hosts(ranks: Sequence[tuple[str, int, int]]) -> list[Hashable]:
    """Return a key for the host of each rank, from its host name, local rank and local size.

    Ranks of one host have the same host name. If hosts share a name, local ranks distinguish them:
    two ranks of one host never have the same one.
    """
    hosts: list[Hashable] = []
    taken: dict[tuple[str, int], list[set[int]]] = {}
    for name, local_rank, local_size in ranks:
        namesakes = taken.setdefault((name, local_size), [])
        number = next((n for n, used in enumerate(namesakes) if local_rank not in used), None)
        if number is None:
            number = len(namesakes)
            namesakes.append(set())
        namesakes[number].add(local_rank)
        hosts.append((name, local_size, number))
    return hosts
