"""Exact evaluation on many ranks: every sample counts once, for any number of samples and ranks.

Rank r of P evaluates the samples r, r + P, ... All ranks have the same number of batches of the
same size; batches are padded with samples whose mask is False, which are not counted:

    batches = ceil(ceil(N / P) / b)
    metric = sum of mask value / sum of mask, over all samples of all ranks

Counts (for example of correct answers and of samples) are integers and are added up by one
allreduce of int64: the result is that of one process, bit by bit. Losses are added up in float64. A
mean over ranks of means over batches is only close to it, and so is the result of samplers that
count padding samples twice.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

import hororing.numpy as hvd
from hororing.extension import ProcessSet, global_process_set
from hororing.toolkit.data.sharding import Indices, place

Mask = NDArray[np.bool_]


def masked_batches(
    samples: int, batch_size: int, rank: int | None = None, size: int | None = None
) -> Iterator[tuple[Indices, Mask]]:
    """Yield the batches of one rank: indices of samples, and which of them count.

    Every batch of every rank has `batch_size` indices, and every rank has the same number of
    batches: ceil(ceil(samples / size) / batch_size). Each index in [0, samples) counts once among
    all ranks. Padding repeats the last index, samples - 1.

    Parameters
    ----------
    rank, size : int, optional
        By default those of hororing.

    Raises
    ------
    ValueError : for a batch size below 1, negative samples, a rank that is not one of `size`.

    Examples
    --------
    >>> for batch, counts in masked_batches(3, batch_size=2, rank=0, size=1):
    ...     print(batch, counts)
    [0 1] [ True  True]
    [2 2] [ True False]
    """
    if rank is None or size is None:
        if rank is not size:
            raise ValueError("masked_batches: give rank and size, or neither of them")
        rank, size = place()
    if batch_size < 1 or samples < 0 or not 0 <= rank < size:
        raise ValueError(
            f"masked_batches: samples={samples}, batch_size={batch_size}, rank={rank}, "
            f"size={size}: must be at least 0, at least 1, and a rank below size"
        )
    return _masked_batches(samples, batch_size, rank, size)


def _masked_batches(
    samples: int, batch_size: int, rank: int, size: int
) -> Iterator[tuple[Indices, Mask]]:
    longest = -(-samples // size)
    for first in range(0, longest, batch_size):
        indices = rank + size * np.arange(first, first + batch_size, dtype=np.int64)
        mask = indices < samples
        yield np.where(mask, indices, samples - 1), mask


def masked_arrays(
    arrays: Sequence[Any], batch_size: int, rank: int | None = None, size: int | None = None
) -> Iterator[tuple[Any, ...]]:
    """Yield (batch of each array..., mask), by `masked_batches`.

    Arrays: NumPy arrays, or anything that accepts an array of indices, of equal length.

    >>> for batch, mask in masked_arrays([np.arange(3) * 10], batch_size=2):  # on one rank
    ...     print(batch, mask.sum())
    [ 0 10] 2
    [20 20] 1
    """
    if len({len(array) for array in arrays}) != 1:
        raise ValueError(f"masked_arrays: lengths differ: {[len(array) for array in arrays]}")
    batches = masked_batches(len(arrays[0]), batch_size, rank, size)
    return ((*(array[indices] for array in arrays), mask) for indices, mask in batches)


@dataclass(frozen=True)
class Total:
    """A metric over all ranks: the sum of its values (an int if they were) and their number.

    >>> Total(3, 4).mean
    0.75
    """

    total: int | float
    count: int

    @property
    def mean(self) -> float:
        """The metric."""
        return self.total / self.count


class Totals:
    """Adds up metrics on this rank, and then over the ranks.

    Parameters
    ----------
    names : iterable of str
        Of the metrics, the same on all ranks.

    Examples
    --------
    >>> totals = Totals(["correct", "loss"])
    >>> totals.add("correct", np.array([True, False, True]), mask=np.array([True, True, False]))
    >>> totals.add("loss", np.array([0.5, 0.25, 0.0]), mask=np.array([True, True, False]))
    >>> totals.reduced()["correct"]  # of one rank
    Total(total=1, count=2)
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = sorted(names)
        self._integers = dict.fromkeys(self.names, 0)
        self._floats: dict[str, list[float]] = {name: [] for name in self.names}
        self._counts = dict.fromkeys(self.names, 0)
        self._failure: Exception | None = None

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """Keep an error in here for `reduced`, so that the other ranks do not wait in vain."""
        try:
            yield
        except Exception as error:
            self._failure = error

    def add(self, name: str, values: Any, mask: Any = None) -> None:
        """Add the values of a batch.

        Parameters
        ----------
        values : array_like
            Shape (batch, ...); integers and booleans are counted exactly, others added up in
            float64.
        mask : array_like of bool, optional
            Booleans of shape (batch,): which of them count. Others may be anything, NaN too.

        Raises
        ------
        ValueError : for values that are not one (or several) per sample.
        """
        values = np.asarray(values)
        if values.ndim == 0:
            raise ValueError(
                f"metric '{name}' is one number for a batch; it must have one value per sample, so "
                "that padding samples can be left out"
            )
        if mask is not None:
            mask = np.asarray(mask)
            if mask.dtype != np.bool_ or mask.shape != values.shape[:1]:
                raise ValueError(
                    f"metric '{name}': values of shape {values.shape} need a mask of bool and of "
                    f"shape {values.shape[:1]}, not {mask.dtype} {mask.shape}"
                )
            values = values[mask]
        exact = values.dtype.kind in "biu"
        total = values.sum(dtype=np.int64 if exact else np.float64)
        self.add_sum(name, int(total) if exact else float(total), values.size)

    def add_sum(self, name: str, total: int | float, count: int) -> None:
        """Add a sum of `count` values."""
        if isinstance(total, int):
            self._integers[name] += total
        else:
            self._floats[name].append(total)
        self._counts[name] += count

    def reduced(self, process_set: ProcessSet = global_process_set) -> dict[str, Total]:
        """Return the sums over the ranks of a set, the same on each. All of these ranks call it.

        One allreduce of int64, one of float64.

        Raises
        ------
        ValueError : on every rank, when their names differ (MismatchError, when there are more on
            one), and for a metric without any values.
        RuntimeError : on the other ranks, when one failed while `adding`, where that error is
            raised again.
        """
        names = self.names
        pairs = [(self._integers[n], self._counts[n], int(bool(self._floats[n]))) for n in names]
        # The sums tell every rank whether x is the same on all: if P sum x^2 = (sum x)^2. It has 24
        # bits, so that nothing wraps below 2^15 ranks.
        x = zlib.crc32("\0".join(names).encode()) >> 8
        integers = hvd.allreduce(
            np.array([(1, x, x * x), (self._failure is not None, 0, 0), *pairs], np.int64),
            name="evaluation.counts", op=hvd.Sum, process_set=process_set,
        )  # fmt: skip
        (ranks, total_x, squares), (failures, _, _) = integers[:2].tolist()
        if failures:
            self._raise_failure(process_set)
        if ranks * squares != total_x**2:
            everybody = hvd.allgather_object(names, "evaluation.differ", process_set)
            listed = "; ".join(
                f"rank {rank}: {', '.join(each)}"
                for rank, each in zip(process_set.ranks, everybody, strict=True)
            )
            raise ValueError(f"ranks evaluate different metrics: {listed}")
        floats = hvd.allreduce(
            np.array([sum(self._floats[n]) for n in names], np.float64), name="evaluation.sums",
            op=hvd.Sum, process_set=process_set,
        )  # fmt: skip
        results = {}
        for name, (total, count, inexact), rest in zip(
            names, integers[2:].tolist(), floats.tolist(), strict=True
        ):
            if count == 0:
                raise ValueError(
                    f"metric '{name}' has no values on any rank; is the data set empty?"
                )
            results[name] = Total(total + rest if inexact else total, count)
        return results

    def _raise_failure(self, process_set: ProcessSet) -> NoReturn:
        error = self._failure
        text = None if error is None else f"{type(error).__name__}: {error}"
        texts = hvd.allgather_object(text, "evaluation.failed", process_set)
        if error is not None:
            raise error
        failed = zip(process_set.ranks, texts, strict=True)
        listed = "; ".join(f"rank {rank}: {each}" for rank, each in failed if each is not None)
        raise RuntimeError(f"evaluation failed on other ranks: {listed}")


def evaluate_checkpoints(
    checkpoints: Iterable[str | os.PathLike[str]],
    evaluate: Callable[[str], Mapping[str, Total]],
    output: str | os.PathLike[str] | None = None,
) -> dict[str, dict[str, Total]]:
    """Evaluate checkpoints one after the other, each on all ranks with a shard per rank.

    Parameters
    ----------
    checkpoints : iterable of str or PathLike
        paths. Rank 0's are used: others may see a file later, or not at all.
    evaluate : callable
        Called with each of them on every rank; loads it, and returns what `Totals.reduced()`
        (or `evaluate` of an adapter) returned.
    output : str or PathLike, optional
        A file that gets, on rank 0, a line of JSON per checkpoint as soon as it is evaluated:
        {"checkpoint": ..., "correct": {"total": ..., "count": ..., "mean": ...}}. Checkpoints
        in the file are not evaluated again: an interrupted evaluation continues.

    Returns
    -------
    dict of str to dict of str to Total
        The results by path, including those in the file; the same on every rank.

    Raises
    ------
    OSError, ValueError : `output` cannot be written, or has other contents; on every rank, before
        any evaluation.
    TypeError : `evaluate` returned something else.
    """
    paths = [os.fspath(path) for path in checkpoints]
    done: dict[str, dict[str, Total]] = {}
    error: Exception | None = None
    if output is not None and hvd.rank() == 0:
        try:
            done = _read(output)
        except (OSError, ValueError) as failed:
            error = failed
    paths, done, error = hvd.broadcast_object((paths, done, error), name="evaluation.checkpoints")
    if error is not None:
        raise error
    results: dict[str, dict[str, Total]] = {}
    for path in paths:
        found = done[path] if path in done else evaluate(path)
        if not isinstance(found, Mapping) or not all(isinstance(t, Total) for t in found.values()):
            raise TypeError(
                f"evaluate({path!r}) must return what Totals.reduced() or evaluate of an adapter "
                f"returns, a dict of Totals, not {found!r:.80}"
            )
        results[path] = dict(found)
        if output is None or path in done or hvd.rank() != 0:
            continue
        line = {
            name: {"total": _plain(each.total), "count": each.count, "mean": _plain(each.mean)}
            for name, each in results[path].items()
        }
        with open(output, "a") as file:
            file.write(json.dumps({"checkpoint": path, **line}) + "\n")
    return results


def _plain(number: int | float) -> int | float | str:
    """Return `number` as JSON has it: text for NaN and infinities, which `float` reads."""
    return number if math.isfinite(number) else str(number)


def _read(output: str | os.PathLike[str]) -> dict[str, dict[str, Total]]:
    """Results by checkpoint. An incomplete last line, of a killed process, is dropped.

    A file with other contents is a ValueError, and not changed.
    """
    results = {}
    with open(output, "ab+") as file:  # creates it, and checks that it can be written
        file.seek(0)
        data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        begin = b'{"checkpoint": '[: len(data)]
        if not data.startswith(begin):
            raise ValueError(f"{os.fspath(output)!r} holds no results; pass another file")
        for number, text in enumerate(whole.splitlines(), 1):
            try:
                line = json.loads(text)
                path = line.pop("checkpoint")
                results[path] = {
                    name: Total(float(total) if isinstance(total, str) else total, each["count"])
                    for name, each in line.items()
                    for total in [each["total"]]
                }
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(
                    f"line {number} of {os.fspath(output)!r} is not a result of "
                    "evaluate_checkpoints; pass another file, or delete the line"
                ) from None
        file.truncate(len(whole))
    return results
