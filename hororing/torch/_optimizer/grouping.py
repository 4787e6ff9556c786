"""Which gradients of an optimizer travel together: a `Grouping`, which one reducer is given.

`Grouping` itself forms the groups that the script wants. `Measured` (auto_groups.py), `Compressed`
and `Chosen` (hororing/torch/compression) find some themselves, and override what they need: the
reducer calls every method at its moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from hororing._adapters.optimizer_options import Reduction
from hororing._requests.compression import StatefulCompression
from hororing.torch._optimizer.gradient import Gradient
from hororing.torch._optimizer.routes import Group
from hororing.torch._optimizer.step import Step

Entry = tuple[torch.Tensor, Gradient]


class Grouping:
    """Groups that are fixed. `wanted` are the parameters of each."""

    state_key: ClassVar[str] = ""  # of what it keeps in the optimizer's state; "": nothing
    step: Step
    gradients: dict[int, Entry]  # all of the optimizer, by id(parameter)

    def __init__(
        self,
        options: Reduction,
        prefix: str,
        wanted: Sequence[Sequence[torch.Tensor]],
        method: StatefulCompression | None,
    ) -> None:
        self.options, self.prefix, self.method = options, prefix, method
        self.wanted = [list(params) for params in wanted]
        self.found: list[list[torch.Tensor]] = []  # the parameters of groups that nobody wanted
        self.groups: list[Group] = []

    # -- parameters -------------------------------------------------------------------------------

    def begin(self, step: Step, gradients: dict[int, Entry]) -> None:
        """Hear of the optimizer's step, and where its gradients will be found."""
        self.step, self.gradients = step, gradients

    def form(self, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        """Reduce these parameters' gradients together. REQUIRES: nothing is in flight."""
        self.groups = []
        for index, params in enumerate(groups):
            members = [self.gradients[id(param)][1] for param in params]
            name = f"{self.prefix}.group.{index}:{members[0].name}..{members[-1].name}"
            self.join(Group(name, len(members), self.options), members)

    def join(self, group: Group, members: Sequence[Gradient]) -> None:
        """Put gradients into a group."""
        for position, gradient in enumerate(members):
            gradient.join(group, position)
        self.groups.append(group)

    # -- what others need to hear -----------------------------------------------------------------

    def follow(self, entries: list[Entry]) -> None: ...  # these are to be reduced from now on
    def before_hook(self, param: torch.Tensor) -> None: ...  # it gets one, after this call
    def pass_ended(self) -> None: ...  # a backward pass
    def before_wait(self) -> None: ...  # all gradients are sent
    def after_wait(self) -> None: ...  # all gradients are reduced
    def release(self) -> None: ...  # the optimizer is gone

    # What ranks agree on in `step()`: not in backward, where they may use different optimizers.

    @property
    def agrees(self) -> bool:
        """Whether nothing is left to be agreed on in this step."""
        return True

    def expect_agreement(self) -> None:
        """Hear that gradients will be reduced, if they are not, and then `agree` be called."""

    def agree(self) -> None:
        """Agree with the other ranks. After an interrupt another call continues."""

    def restart(self, *, reduced: bool) -> None:
        """Hear that another step begins, and whether the last one's gradients were reduced."""

    # -- state ------------------------------------------------------------------------------------

    def kept(self) -> Any:
        """Return what the optimizer's state shall hold under `state_key`."""
        return {}

    def adopt(self, kept: Any) -> None:
        """Replace what `kept` returns."""

    def note_scale(self, scale: torch.Tensor) -> None:
        """Hear of the scale of `torch.amp.GradScaler`, a tensor that it changes in place."""
