"""What the user asks of a distributed optimizer, checked."""

from __future__ import annotations

import dataclasses
import operator
import warnings
from collections.abc import Sequence
from typing import Any

from hororing import arguments
from hororing.arguments import Adasum, Average
from hororing.compression import Compressor, NoneCompressor, check_compression
from hororing.names import OPTIMIZER, default_name
from hororing.process_sets import ProcessSet, check_member, global_process_set
from hororing.runtime import size

WHAT = "DistributedOptimizer"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How an optimizer reduces. Not a tuple: Keras looks into those when it saves a model."""

    name: str  # what the names of its requests begin with
    op: int
    predivide: float
    compression: type[Compressor]
    sparse_as_dense: bool
    groups: int | tuple[tuple[Any, ...], ...]  # a number, or variables; 0: none
    process_set: ProcessSet
    scale_local: bool
    passes: int  # gradients that are added up before each reduction
    average_passes: bool

    @property
    def factors(self) -> tuple[float, float]:
        """Factors before and after the reduction."""
        return 1.0 / self.predivide, self.predivide

    @property
    def reduces(self) -> bool:
        """Whether this rank has somebody to reduce with."""
        return self.process_set.included() and len(self.process_set.ranks) > 1

    def for_maxima(self, op: int) -> Settings:
        """Return the settings under which variables that are no weights are reduced."""
        return dataclasses.replace(self, op=op, predivide=1.0, compression=NoneCompressor, groups=0)


def checked_settings(
    *,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = NoneCompressor,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Settings:
    """Make settings of a user's arguments. ValueError and TypeError for wrong ones."""
    for argument, value in (("device_dense", device_dense), ("device_sparse", device_sparse)):
        check_text(argument, value)
    if name is not None:
        check_text("name", name)
    arguments.check_op(op)
    check_compression(compression)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(f"{WHAT}: gradient_predivide_factor is for op=Average only; leave it out")
    if not gradient_predivide_factor > 0:
        raise ValueError(
            f"{WHAT}: gradient_predivide_factor={gradient_predivide_factor} must be positive"
        )
    if operator.index(backward_passes_per_step) < 1:
        raise ValueError(
            f"{WHAT}: backward_passes_per_step={backward_passes_per_step} must be at least 1"
        )
    if num_groups != 0:
        warnings.warn(
            "parameter `num_groups` is deprecated; use `groups`", DeprecationWarning, stacklevel=3
        )
        if groups is not None:
            raise ValueError(f"{WHAT}: num_groups and groups exclude each other; use groups")
        groups = num_groups
    if op == Adasum and average_aggregated_gradients:
        raise ValueError(
            f"{WHAT}: average_aggregated_gradients cannot be used with op=Adasum; leave it out"
        )
    size()  # raises before `init`
    members = getattr(process_set, "process_set_id", None)
    if members is None or process_set.included():  # ranks outside it may have it as well
        members = check_member(process_set, WHAT)
    if op == Adasum:
        arguments.check_adasum(members, WHAT)
    if name is None:  # not Keras' own, which differ where a rank has made more optimizers
        name = f"{WHAT}.{default_name(OPTIMIZER, members).rpartition('.')[2]}"
    return Settings(
        name=name,
        op=op,
        predivide=float(gradient_predivide_factor),
        compression=compression,
        sparse_as_dense=bool(sparse_as_dense),
        groups=_checked_groups(groups),
        process_set=process_set,
        scale_local=bool(scale_local_gradients),
        passes=backward_passes_per_step,
        average_passes=bool(average_aggregated_gradients),
    )


def check_text(argument: str, value: object) -> None:
    """Raise TypeError unless `value` is a str."""
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be a str, not {type(value).__name__} ({value!r})")


def _checked_groups(
    groups: int | Sequence[Sequence[Any]] | None,
) -> int | tuple[tuple[Any, ...], ...]:
    if groups is None:
        return 0
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 1:
            raise ValueError(f"{WHAT}: groups={groups} must be at least 1, or lists of variables")
        return groups
    if not isinstance(groups, list | tuple) or any(
        not isinstance(group, list | tuple) or not group for group in groups
    ):
        raise ValueError(f"{WHAT}: groups must be a number, or non-empty lists of variables")
    return tuple(tuple(group) for group in groups)
