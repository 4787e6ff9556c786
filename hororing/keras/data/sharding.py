"""ShardedArrays: what `hororing.data.sharding.Shard` is for ``model.fit`` on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hororing.data.sharding import Shard


class ShardedArrays(keras.utils.PyDataset):  # type: ignore[misc]  # Keras declares no types
    """Batches of one process's shard of arrays, in another order every epoch of ``model.fit``.

    Pass ``shuffle=False`` to `fit`: Keras would shuffle the batches again, on each process its own
    way, and a step would not have the samples that `Shard` promises.

    Parameters
    ----------
    arrays : equally long, of NumPy or what else takes an array of indices: (x, y), or
        (x, y, sample_weight).
    batch_size : of this process.
    shard : says which samples, and in what order; by default ``Shard(len(arrays[0]))``. The epoch
        that it has, and what it knows as processed, is where training begins. `on_epoch_end`, which
        Keras calls, begins the next one.
    **options : of keras.utils.PyDataset, as workers.

    Raises
    ------
    ValueError : for arrays that differ in length, from each other or from the shard's data set, and
        for a shard with remainder="uneven": processes must have the same number of steps.
    """

    def __init__(
        self,
        arrays: Sequence[Any],
        batch_size: int,
        shard: Shard | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.arrays = tuple(arrays)
        self.batch_size = batch_size
        self.shard = Shard(len(self.arrays[0])) if shard is None else shard
        lengths = [len(array) for array in self.arrays]
        if set(lengths) != {self.shard.samples}:
            raise ValueError(
                f"ShardedArrays: arrays of {lengths} samples, and a shard of a data set of "
                f"{self.shard.samples}"
            )
        if self.shard.remainder == "uneven":
            raise ValueError(
                'ShardedArrays: remainder="uneven" gives processes different numbers of steps, and '
                'the last ones would wait for nobody; use "drop" or "repeat"'
            )
        self._left = self.shard.left()

    @property
    def num_batches(self) -> int:
        """Steps of the epoch; the last one may have a smaller batch, as small on every process."""
        return -(-len(self._left) // self.batch_size)

    def __getitem__(self, batch: int) -> tuple[Any, ...]:
        indices = self._left[batch * self.batch_size : (batch + 1) * self.batch_size]
        return tuple(array[indices] for array in self.arrays)

    def on_epoch_end(self) -> None:
        """Begin the next epoch."""
        self.shard.set_epoch(self.shard.epoch + 1)
        self._left = self.shard.left()
