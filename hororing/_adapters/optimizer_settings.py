"""The checked options of a distributed optimizer."""

from __future__ import annotations

import dataclasses
from typing import Any

from hororing._adapters.optimizer_options import Reduction, checked_passes, checked_reduction
from hororing._requests.arguments import Adasum, check_flag, check_text
from hororing._requests.compression import NoneCompressor
from hororing._requests.names import OPTIMIZER, default_name

WHAT = "DistributedOptimizer"


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
