"""ShardedArrays: `hororing.toolkit.data.sharding.Shard` for ``model.fit`` on arrays."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from hororing.toolkit.data.sharding import Shard


class ShardedArrays(keras.utils.PyDataset):  # type: ignore[misc]  # Keras declares no types
    """Batches of one process's shard of arrays, in another order every epoch of ``model.fit``.

    The callback begins the shard's epoch when Keras begins that epoch. (Keras also calls
    `on_epoch_end` without an end of an epoch, so the data set cannot count epochs.) With
    ``shuffle=True`` Keras would shuffle the batches again, differently on each process, and a step
    would not have the samples that `Shard` promises.

    Parameters
    ----------
    arrays : sequence
        Of equal length, of NumPy or anything that takes an array of indices: (x, y), or (x, y,
        sample_weight).
    batch_size : int
        Of this process.
    shard : Shard, optional
        The samples and their order; by default ``Shard(len(arrays[0]))``. To resume within an
        epoch pass ``initial_epoch=shard.epoch`` to `fit`: the shard's processed samples are
        left out. (Keras warns that the data of this short epoch ran out, and continues.).
    **options : dict
        Of keras.utils.PyDataset, as workers. On torch and JAX, several workers need a model
        that has been built with its metrics, such as by ``model.evaluate(x[:1], y[:1])``.

    Raises
    ------
    ValueError : for arrays that differ in length, from each other or from the shard's data set, and
        for a shard with remainder="uneven": processes must have the same number of steps.

    Examples
    --------
    >>> data = ShardedArrays((x, y), batch_size=4)
    >>> model.fit(data, epochs=2, shuffle=False, callbacks=[data.callback()])
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
                'those with more would wait for the others; use "drop" or "repeat"'
            )
        self._left = self.shard.left()
        self._within = False
        self._begun: list[int] = []
        self.read_ahead = False  # whether workers have read batches for building a model

    @property
    def num_batches(self) -> int:
        """Steps of this epoch; the last one may have a smaller batch, as small on every process.

        Between epochs it is that of a whole one: Keras asks once for all, too.
        """
        shard = self.shard
        rounded_up = shard.size - 1 if shard.remainder == "repeat" else 0
        whole = (shard.samples + rounded_up) // shard.size
        return -(-(len(self._left) if self._within else whole) // self.batch_size)

    def __getitem__(self, batch: int) -> tuple[Any, ...]:
        indices = self._left[batch * self.batch_size : (batch + 1) * self.batch_size]
        return tuple(array[indices] for array in self.arrays)

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, with its remaining batches if the shard is in it."""
        if epoch != self.shard.epoch:
            self.shard.set_epoch(epoch)
        self._left = self.shard.left()
        self._within = True

    def on_epoch_end(self) -> None:
        """Keras calls it, at the end of an epoch and before the first."""
        self._within = False

    def on_epoch_begin(self) -> None:
        """Warn if all epochs have the same order; Keras calls it."""
        keeps = keras.backend.backend() in ("torch", "jax")
        works = self.workers > 1 or (self.workers > 0 and self.use_multiprocessing)
        self.read_ahead = keeps and works and not self._within
        self._begun.append(self.shard.epoch)
        if self._begun == [self._begun[0]] * 3:  # the first may have built the model
            warnings.warn(
                "ShardedArrays: every epoch has the order of the first; pass "
                "callbacks=[data.callback()] to fit",
                stacklevel=2,
            )

    def callback(self) -> keras.callbacks.Callback:
        """Return what `fit` needs among its callbacks."""
        return _Epochs(self)


class _Epochs(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, data: ShardedArrays) -> None:
        super().__init__()
        self.data = data
        data.read_ahead = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.data.read_ahead:
            raise ValueError(
                "ShardedArrays: fit has taken a batch to build the model, and Keras gives those "
                "that the workers have read ahead to the next epochs. Build the model and its "
                "metrics before, as with model.evaluate(x[:1], y[:1]), or use workers=1"
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.data.begin_epoch(epoch)
