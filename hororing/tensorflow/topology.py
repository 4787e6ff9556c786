"""The topology, queried when the graph runs, not when it is built: an elastic job changes it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from hororing._engine import state
from hororing._requests.process_sets import ids_and_ranks


def at_run_time(answer: Callable[[], int], name: str | None = None) -> tf.Tensor:
    """Return `answer()` as an int32: at once, or, in a graph, whenever that runs."""
    if tf.executing_eagerly():
        return tf.constant(answer(), tf.int32)
    result = tf.numpy_function(lambda: np.int32(answer()), [], tf.int32, name=name)
    result.set_shape([])
    return result


def _set_of(process_set_id: int) -> list[int]:
    state.size()  # raises before `init`
    sets = ids_and_ranks()
    if process_set_id not in sets:
        raise ValueError(f"there is no process set {process_set_id}; there are {sorted(sets)}")
    return sets[process_set_id]


def rank_op(name: str | None = None) -> tf.Tensor:
    """`rank()` when the graph runs, not when it is built. (An elastic job changes it.)

    >>> rank = tf.function(hvd.rank_op)()
    """
    return at_run_time(state.rank, name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """`local_rank()` when the graph runs."""
    return at_run_time(state.local_rank, name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """`local_size()` when the graph runs."""
    return at_run_time(state.local_size, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks of a process set when the graph runs.

    >>> size = tf.function(hvd.size_op)()
    """
    return at_run_time(lambda: len(_set_of(process_set_id)), name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Whether this rank is in a process set when the graph runs: 1 or 0."""
    return at_run_time(lambda: int(state.rank() in _set_of(process_set_id)), name)


__all__ = [
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "size_op",
]
