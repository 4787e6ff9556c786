"""ShardSampler: `hororing.toolkit.data.sharding.Shard` as a sampler of torch.utils.data."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import Sampler

from hororing.toolkit.data.sharding import Shard


class ShardSampler(Shard, Sampler[int]):
    """The samples of one process, for ``DataLoader(dataset, sampler=...)``.

    Like torch's DistributedSampler it needs `set_epoch` before every epoch. It can also resume
    within an epoch, on another number of processes: see `record_batch`, `state_dict` and
    `synchronize` of `hororing.toolkit.data.sharding.Shard`. A DataLoader draws batches before they
    are used, so drawing records nothing.

    Parameters
    ----------
    dataset : Sized or int
        An object with the length of the data set, or that length.
    rank, size : int, optional
        As for `Shard`.
    **options : dict
        `seed`, `shuffle` and `remainder`, as for `Shard`.

    Examples
    --------
    >>> sampler = ShardSampler(dataset, seed=1)
    >>> loader = DataLoader(dataset, batch_size, sampler=sampler)
    >>> sampler.set_epoch(epoch)
    """

    def __init__(
        self,
        dataset: Sized | int,
        rank: int | None = None,
        size: int | None = None,
        **options: Any,
    ) -> None:
        samples = dataset if isinstance(dataset, int) else len(dataset)
        Shard.__init__(self, samples, rank, size, **options)
