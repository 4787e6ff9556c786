"""The samples of a process: equal, disjoint shards of a seeded permutation, epoch by epoch.

The permutation of N samples is a function of (seed, epoch) alone: the order of N 64-bit words that
Philox makes of them, whose stream NumPy guarantees for all its versions and machines. Process r of
P takes every P-th of the epoch's remaining samples, from the r-th on. So a step's samples depend
only on the product P b, where b is the number of samples per process.

Only `Shard.synchronize` communicates.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import hororing.numpy as hvd
from hororing.extension import ProcessSet, check_member, global_process_set

Indices = NDArray[np.int64]

# How shards become equal when the processes do not divide the samples.
REMAINDERS: Final = ("drop", "repeat", "uneven")


def permutation(samples: int, *, seed: int, epoch: int) -> Indices:
    """Return the order of `samples` samples in an epoch, the same on every process.

    Raises
    ------
    ValueError : for a negative number.

    Examples
    --------
    >>> sorted(permutation(5, seed=1, epoch=0).tolist())
    [0, 1, 2, 3, 4]
    """
    for name, value in (("samples", samples), ("seed", seed), ("epoch", epoch)):
        _natural(name, value)
    words = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(samples)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def place(process_set: ProcessSet = global_process_set) -> tuple[int, int]:
    """Return (rank, size) of this process in a process set.

    >>> place()  # on one rank
    (0, 1)
    """
    rank = hvd.rank()
    check_member(process_set, "shard")
    return process_set.ranks.index(rank), len(process_set.ranks)


class Shard:
    """The samples of one process, in a new order every epoch. Can stop and resume.

    Iterating yields the indices of this process that are left in the epoch. `record` (or
    `record_batch`) notes processed samples, which are part of `state_dict()` and are not yielded
    again before the next epoch. After a change of the number of processes, `synchronize` or `merge`
    and `reshard` divide the samples that no process has processed. `synchronize` also completes
    the record before it is saved.

    Parameters
    ----------
    samples : int
        Of the whole data set (or files, if processes read whole files).
    rank, size : int, optional
        This process among those that share the samples; by default those of hororing.
    seed : int, optional
        Of the permutations; equal on all processes.
    shuffle : bool, optional
        False for the order of the data set in every epoch.
    remainder : str, optional
        If `size` does not divide the samples: "drop" leaves the last ones of the permutation
        (fewer than `size`) out of this epoch, "repeat" takes the missing ones from its start
        again, "uneven" gives some processes one more than others. With the first two, all
        shards have the same length.

    Raises
    ------
    ValueError : for a wrong argument; from `iter` and `len` with "drop" if nothing would be left
        of an epoch that no rank has begun.

    Examples
    --------
    >>> shard = Shard(10, rank=1, size=2, shuffle=False)
    >>> shard.record_batch(0, batch_size=2)  # 1 and 3 are done
    >>> list(shard)
    [5, 7, 9]
    >>> state = shard.state_dict()  # goes into the checkpoint
    """

    def __init__(
        self,
        samples: int,
        rank: int | None = None,
        size: int | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        remainder: str = "drop",
    ) -> None:
        if remainder not in REMAINDERS:
            raise ValueError(f"Shard: remainder={remainder!r} is not one of {REMAINDERS}")
        self.samples = _natural("samples", samples)
        self.seed = _natural("seed", seed)
        self.shuffle = bool(shuffle)
        self.remainder = remainder
        self.epoch = 0
        self._processed = np.zeros(self.samples, np.bool_)  # by any process
        self._mine: Indices | None = None  # made when it is asked for
        self.rank, self.size = 0, 1
        if (rank is None) != (size is None):
            raise ValueError("Shard: give rank and size, or neither of them")
        self.reshard(*(place() if rank is None or size is None else (rank, size)))

    def reshard(self, rank: int, size: int) -> None:
        """Become process `rank` of `size`: share the rest of the epoch anew."""
        if not 0 <= operator.index(rank) < operator.index(size):
            raise ValueError(f"Shard: there is no rank {rank!r} among {size!r} processes")
        self.rank, self.size = rank, size
        self._mine = None

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch at its first sample, with its own permutation."""
        self.epoch = _natural("epoch", epoch)
        self._processed[:] = False
        self._mine = None

    def indices(self) -> Indices:
        """Return this process's indices of the epoch (or of its rest), as it was last shared.

        They stay the same until `set_epoch`, `reshard`, `merge` or `load_state_dict`.
        """
        if self._mine is None:
            self._mine = self._share()
        return self._mine

    def __len__(self) -> int:
        return len(self.left())

    def __iter__(self) -> Iterator[int]:
        return iter(self.left().tolist())

    def left(self) -> Indices:
        """Return the indices of this process that have not been recorded as processed."""
        mine = self.indices()
        return mine[~self._processed[mine]]

    def record(self, indices: Iterable[int]) -> None:
        """Record samples as processed, by any process.

        Raises
        ------
        ValueError : for an index that the data set does not have.
        """
        given = np.fromiter(indices, np.int64)
        if len(given) and (given.min() < 0 or given.max() >= self.samples):
            raise ValueError(
                f"Shard.record: indices must be in [0, {self.samples}), not "
                f"{given.min()} to {given.max()}"
            )
        self.indices()  # recording samples does not change the shares
        self._processed[given] = True

    def record_batch(self, batch: int, batch_size: int) -> None:
        """Record that this process has processed its `batch`-th batch of `batch_size` samples.

        Batches are counted from 0 in `indices()`, since the epoch was last shared. ValueError for a
        batch that does not exist.
        """
        indices = self.indices()
        if batch < 0 or batch_size < 1 or batch * batch_size >= len(indices):
            raise ValueError(
                f"Shard.record_batch: there is no batch {batch} of {batch_size} samples among "
                f"{len(indices)}; count from 0 in each epoch and after synchronize()"
            )
        self.record(indices[batch * batch_size : (batch + 1) * batch_size])

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume the epoch, on any number of processes.

        `processed` has the samples that this process knows of: call `synchronize` for those of all.
        It is a list, which JSON and `torch.load` read.
        """
        return {
            "samples": self.samples,
            "seed": self.seed,
            "epoch": self.epoch,
            "processed": np.flatnonzero(self._processed).tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict()`. ValueError if it is of another data set."""
        if state["samples"] != self.samples:
            raise ValueError(
                f"Shard.load_state_dict: the state is of {state['samples']} samples, the shard of "
                f"{self.samples}; resume with the same data set"
            )
        self.seed = _natural("seed", state["seed"])
        self.set_epoch(state["epoch"])
        self.record(state["processed"])
        self._mine = None

    def merge(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Add the processed samples of other processes in this epoch, and share the rest anew."""
        self._add(list(states))
        self._mine = None

    def _add(self, states: Sequence[Mapping[str, Any]]) -> None:
        mine = (self.samples, self.seed, self.epoch)
        for state in states:
            theirs = (state["samples"], state["seed"], state["epoch"])
            if mine != theirs:
                raise ValueError(
                    f"Shard.merge: states differ in (samples, seed, epoch): {theirs} is not "
                    f"{mine}; use the same arguments and epoch on all processes"
                )
        for state in states:
            self.record(state["processed"])

    def synchronize(self, process_set: ProcessSet = global_process_set) -> None:
        """Add the processed samples of all processes of a set. All of its ranks call it.

        Shares stay as they are, and a loop over them can go on, unless the number of processes has
        changed: then the rest of the epoch is shared anew.

        Raises
        ------
        ValueError : on every rank, when shards differ in samples, seed or epoch.
        """
        at = place(process_set)
        self._add(hvd.allgather_object(self.state_dict(), process_set=process_set))
        if at != (self.rank, self.size):
            self.reshard(*at)

    def _share(self) -> Indices:
        order = (
            permutation(self.samples, seed=self.seed, epoch=self.epoch)
            if self.shuffle
            else np.arange(self.samples, dtype=np.int64)
        )
        order = order[~self._processed[order]]
        extra = len(order) % self.size
        if extra and self.remainder == "drop":
            if len(order) < self.size and len(order) == self.samples:
                raise ValueError(
                    f'Shard: {self.samples} samples for {self.size} processes: remainder="drop" '
                    'would leave none; use remainder="repeat"'
                )
            order = order[: len(order) - extra]
        elif extra and self.remainder == "repeat":
            order = np.resize(order, len(order) + self.size - extra)
        return order[self.rank :: self.size]


def _natural(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"Shard: {name}={value!r} must be an integer of at least 0")
    return number
