"""ShardSampler: what `hororing.toolkit.data.sharding.Shard` is for torch.utils.data."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import Sampler

from hororing.toolkit.data.sharding import Shard


class ShardSampler(Shard, Sampler[int]):
    """The samples of one process, for ``DataLoader(dataset, sampler=...)``.

    As torch's DistributedSampler it needs `set_epoch` before every epoch; and it can stop and
    resume within one, on another number of processes: `hororing.toolkit.data.sharding.Shard` has
    the rest, `record_batch`, `state_dict`, `synchronize` among it. Batches of a DataLoader arrive
    later than they are drawn, so nothing is recorded by drawing.

    Parameters
    ----------
    dataset : what has the length of the data set, or that length.
    rank, size : as for `Shard`.
    **options : `seed`, `shuffle` and `remainder`, as for `Shard`.

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
