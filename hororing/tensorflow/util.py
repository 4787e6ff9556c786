"""Horovod's small functions that scripts and tests import, under its name for the module."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hororing._requests import arguments


def _executing_eagerly() -> bool:
    """Whether operations run at once, instead of being added to a graph."""
    return bool(tf.executing_eagerly())


def vars_to_refs(vars: Any) -> Any:  # Horovod's name
    """Replace variables by references to them, which can be keys and be compared.

    `vars` is a variable of TensorFlow, or a list or tuple of what `vars` may be, which becomes a
    tuple.
    """
    if isinstance(vars, (list, tuple)):
        return tuple(vars_to_refs(each) for each in vars)
    return _tensorflows(vars).ref()


def refs_to_vars(refs: Any) -> Any:
    """Replace references by their variables."""
    if isinstance(refs, (list, tuple)):
        return [refs_to_vars(each) for each in refs]
    return refs.deref()


def _tensorflows(variable: Any) -> Any:
    """Return the variable of TensorFlow inside one of Keras."""
    inner = getattr(variable, "value", None)
    return inner if hasattr(inner, "ref") else variable


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Whether it is 1, 2, 4, 8, ..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """Return the operation for `op` and the deprecated `average`."""
    return arguments.choose_op(op, average)


__all__ = [
    "check_num_rank_power_of_2",
    "handle_average_backwards_compatibility",
    "refs_to_vars",
    "vars_to_refs",
]
