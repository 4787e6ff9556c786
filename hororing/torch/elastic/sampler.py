"""ElasticSampler: every sample once per epoch, even if the number of ranks changes within it."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from hororing._engine import state
from hororing.elastic.partition import samples_left, share_of
from hororing.elastic.steps import Steps


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Distributes the samples of an epoch over the ranks. Does not communicate.

    Call `record_batch` for each batch, and pass the sampler to `TorchState`. After a change of
    members, the samples that no rank has processed are distributed over the new ranks. All ranks
    get the same number: at the end of an epoch up to ``size() - 1`` samples are used twice. Also
    works in jobs that are not elastic.

    >>> sampler = ElasticSampler(dataset)
    >>> for index, batch in enumerate(DataLoader(dataset, batch_size, sampler=sampler)):
    ...     ...
    ...     sampler.record_batch(index, batch_size)
    >>> sampler.set_epoch(epoch + 1)  # when the epoch is over

    Parameters
    ----------
    dataset : Sized
        Of the same length on every rank.
    shuffle : bool, optional
        A new order in each epoch, the same on all ranks; else ascending.
    seed : int, optional
        Of that order, the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0  # samples of this epoch, of all ranks
        self._steps: Steps | None = None
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch without processed samples. Call it when the previous epoch is over."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each rank has processed a batch: the next `batch_size` of its samples.

        `batch_idx` is Horovod's; batches are counted here.
        """
        # A replayed step was taken by the number of ranks at that time.
        ranks = (self._steps.recorded_ranks if self._steps else 0) or self.num_replicas
        self.processed_num = min(self.processed_num + batch_size * ranks, len(self.dataset))

    def record_indices(self, indices: Sized) -> None:
        """Note that this rank has processed the samples `indices`, and each rank as many."""
        self.record_batch(0, len(indices))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return this rank's samples in batch `batch_idx` since the iteration began."""
        return self._mine[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of samples processed in it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a `state_dict`, and distribute the remaining samples over the ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distribute the remaining samples over the present ranks, after `init`."""
        self.rank, self.num_replicas = state.rank(), state.size()
        seed = self.seed + self.epoch if self.shuffle else None
        self.remaining_indices = samples_left(len(self.dataset), self.processed_num, seed)
        self._mine = share_of(self.remaining_indices, self.rank, self.num_replicas)
        self.num_samples = len(self._mine)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's samples, as distributed by `reset`."""
        return iter(self._mine)

    def __len__(self) -> int:
        """Return the number of this rank's samples."""
        return self.num_samples


__all__ = ["ElasticSampler"]
