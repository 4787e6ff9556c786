"""What the user asks of a distributed optimizer, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hororing.arguments import Adasum, Average
from hororing.compression import Compressor, NoneCompressor
from hororing.names import OPTIMIZER, default_name
from hororing.process_sets import ProcessSet, global_process_set
from hororing.reduction import check_reduction, checked_passes, choose_groups

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
    checked_passes(backward_passes_per_step)
    members = check_reduction(WHAT, op, gradient_predivide_factor, compression, process_set)
    groups = choose_groups(WHAT, num_groups, groups)
    if op == Adasum and average_aggregated_gradients:
        raise ValueError(
            f"{WHAT}: average_aggregated_gradients cannot be used with op=Adasum; leave it out"
        )
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
