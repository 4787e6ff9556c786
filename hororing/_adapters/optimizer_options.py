"""The checked arguments of optimizers and tapes, the same for every framework."""

from __future__ import annotations

import dataclasses
import math
import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from hororing._engine import membership, state
from hororing._requests import arguments
from hororing._requests.arguments import Adasum, Average, check_flag, check_text
from hororing._requests.compression import Compressor, NoneCompressor, check_compression
from hororing._requests.names import OPTIMIZER, default_name
from hororing._requests.process_sets import ProcessSet, check_member, global_process_set

WHAT: Final = "DistributedOptimizer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduction:
    """How gradients are reduced. Not a tuple: Keras looks into those when it saves a model."""

    op: int = Average
    predivide: float = 1.0
    compression: type[Compressor] = NoneCompressor
    sparse_as_dense: bool = False
    groups: int | tuple[tuple[Any, ...], ...] = 0  # a number, or variables; 0: none
    process_set: ProcessSet = global_process_set
    scale_local: bool = True  # gradients that are not reduced are divided by the number of ranks

    @property
    def factors(self) -> tuple[float, float]:
        """Factors before and after the reduction."""
        return 1.0 / self.predivide, self.predivide

    @property
    def reduces(self) -> bool:
        """Whether this rank has, or may get, others to reduce with: an elastic job grows."""
        grows = self.process_set is global_process_set and membership.is_elastic()
        return self.process_set.included() and (grows or len(self.process_set.ranks) > 1)


def checked_reduction(
    what: str,
    *,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    compression: type[Compressor] = NoneCompressor,
    sparse_as_dense: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Reduction:
    """Make a reduction from a user's arguments. ValueError and TypeError for wrong ones.

    `what` is the name of the function that was called. `groups` is a number of groups, or lists of
    variables; `num_groups` is its deprecated form.
    """
    op = arguments.check_op(op)
    check_reduction(what, op, gradient_predivide_factor, compression, process_set)
    check_flag(what, "sparse_as_dense", sparse_as_dense)
    check_flag(what, "scale_local_gradients", scale_local_gradients)
    return Reduction(
        op=op,
        predivide=float(gradient_predivide_factor),
        compression=compression,
        sparse_as_dense=bool(sparse_as_dense),
        groups=_checked_groups(what, choose_groups(what, num_groups, groups)),
        process_set=process_set,
        scale_local=bool(scale_local_gradients),
    )


def _checked_groups(
    what: str, groups: int | Sequence[Sequence[Any]] | None
) -> int | tuple[tuple[Any, ...], ...]:
    if groups is None:
        return 0
    if isinstance(groups, int):
        if groups < 1:
            raise ValueError(f"{what}: groups={groups} must be at least 1, or lists of variables")
        return groups
    if not isinstance(groups, list | tuple) or any(
        not isinstance(group, list | tuple) for group in groups
    ):
        raise ValueError(f"{what}: groups must be a number, or a list of lists of variables")
    return tuple(tuple(group) for group in groups)


def check_reduction(
    what: str, op: int, predivide: float, compression: type[Compressor], process_set: ProcessSet
) -> int:
    """Return the number of `process_set`, if gradients can be reduced like this.

    `what` is the name of the function that was called. A rank outside of the set may call it, too.
    """
    arguments.check_op(op)
    check_compression(compression)
    if isinstance(predivide, str) or not hasattr(predivide, "__float__"):
        raise TypeError(
            f"{what}: gradient_predivide_factor must be a number, not {type(predivide).__name__} "
            f"({predivide!r})"
        )
    if predivide != 1.0 and op != Average:
        raise ValueError(f"{what}: gradient_predivide_factor is for op=Average only; leave it out")
    if not 0 < predivide < math.inf:
        raise ValueError(
            f"{what}: gradient_predivide_factor={predivide} must be positive and finite"
        )
    state.size()  # raises before `init`
    members: int | None = getattr(process_set, "process_set_id", None)
    if members is None or process_set.included():
        members = check_member(process_set, what)
    if op == Adasum:
        arguments.check_adasum(members, what)
    return members


def choose_groups(
    what: str, num_groups: int, groups: int | Sequence[Sequence[Any]] | None
) -> int | Sequence[Sequence[Any]] | None:
    """Combine `groups` and its deprecated form. A number is an int then."""
    if num_groups != 0:
        warnings.warn(
            "parameter `num_groups` is deprecated; use `groups`",
            DeprecationWarning,
            stacklevel=arguments.frames_to_script(),
        )
        if groups is not None:
            raise ValueError(f"{what}: num_groups and groups exclude each other; use groups")
        groups = num_groups
    if isinstance(groups, bool | Mapping):
        raise ValueError(
            f"{what}: groups={groups!r} must be a number, or lists of parameters or variables"
        )
    try:
        return operator.index(cast(int, groups))
    except TypeError:
        return groups


def checked_passes(passes: int) -> int:
    """Return the number of backward passes per step, checked."""
    try:
        number = operator.index(passes)
    except TypeError:
        raise TypeError(
            f"backward_passes_per_step must be an int, not {type(passes).__name__} ({passes!r})"
        ) from None
    if number < 1:
        raise ValueError(f"backward_passes_per_step={passes} must be at least 1")
    return passes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Reduction):
    """How an optimizer reduces."""

    name: str  # prefix of the names of its requests
    passes: int  # gradients that are added up before each reduction
    average_passes: bool
    weight: Any = None  # a tensor, during an update: this rank's weight

    def for_maxima(self, op: int) -> Settings:
        """Return the settings for variables that are not weights."""
        return dataclasses.replace(
            self, op=op, predivide=1.0, compression=NoneCompressor, groups=0, weight=None
        )


def checked_settings(
    *,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    **reduction: Any,
) -> Settings:
    """Make settings of a user's arguments, those of `checked_reduction` among them."""
    for argument, value in (("device_dense", device_dense), ("device_sparse", device_sparse)):
        check_text(argument, value)
    if name is not None:
        check_text("name", name)
    checked_passes(backward_passes_per_step)
    check_flag(WHAT, "average_aggregated_gradients", average_aggregated_gradients)
    common = checked_reduction(WHAT, **reduction)
    if not isinstance(common.groups, int) and not all(common.groups):
        raise ValueError(f"{WHAT}: groups must be a number, or non-empty lists of variables")
    if common.op == Adasum and average_aggregated_gradients:
        raise ValueError(
            f"{WHAT}: average_aggregated_gradients cannot be used with op=Adasum; leave it out"
        )
    if name is None:  # not Keras' own, which differ where a rank has made more optimizers
        members = common.process_set.process_set_id
        assert members is not None
        name = f"{WHAT}.{default_name(OPTIMIZER, members).rpartition('.')[2]}"
    return Settings(
        **vars(common),
        name=name,
        passes=backward_passes_per_step,
        average_passes=bool(average_aggregated_gradients),
    )


class WithoutWeight:
    """A mixin of distributed optimizers that reduce plain averages: a weight would be ignored."""

    @property
    def weight(self) -> None:
        """None: all ranks count the same.

        Raises
        ------
        NotImplementedError : when it is set.
        """
        return None

    @weight.setter
    def weight(self, weight: Any) -> None:
        if weight is not None:
            raise NotImplementedError(
                f"optimizer: weight is for {WHAT} of Keras 3 and of torch; here use "
                "DistributedGradientTape(tape, weight=)"
            )
