"""Checks of what optimizers and tapes are asked for, the same for every framework."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from typing import Any

from hororing import arguments, runtime
from hororing.arguments import Adasum, Average
from hororing.compression import Compressor, check_compression
from hororing.process_sets import ProcessSet, check_member


def check_reduction(
    what: str, op: int, predivide: float, compression: type[Compressor], process_set: ProcessSet
) -> int:
    """Return the number of `process_set`, if gradients can be reduced like this.

    `what` is the name of the function that was called. A rank outside of the set may call it, too.
    """
    arguments.check_op(op)
    check_compression(compression)
    if predivide != 1.0 and op != Average:
        raise ValueError(f"{what}: gradient_predivide_factor is for op=Average only; leave it out")
    if not predivide > 0:
        raise ValueError(f"{what}: gradient_predivide_factor={predivide} must be positive")
    runtime.size()  # raises before `init`
    members: int | None = getattr(process_set, "process_set_id", None)
    if members is None or process_set.included():
        members = check_member(process_set, what)
    if op == Adasum:
        arguments.check_adasum(members, what)
    return members


def choose_groups(
    what: str, num_groups: int, groups: int | Sequence[Sequence[Any]] | None
) -> int | Sequence[Sequence[Any]] | None:
    """Return what `groups` and its deprecated form ask for together."""
    if num_groups == 0:
        return groups
    warnings.warn(
        "parameter `num_groups` is deprecated; use `groups`",
        DeprecationWarning,
        stacklevel=arguments.frames_to_script(),
    )
    if groups is not None:
        raise ValueError(f"{what}: num_groups and groups exclude each other; use groups")
    return num_groups


def checked_passes(passes: int) -> int:
    """Return the number of backward passes per step if it is one."""
    try:
        number = operator.index(passes)
    except TypeError:
        raise TypeError(
            f"backward_passes_per_step must be an int, not {type(passes).__name__} ({passes!r})"
        ) from None
    if number < 1:
        raise ValueError(f"backward_passes_per_step={passes} must be at least 1")
    return passes
