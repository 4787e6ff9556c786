"""The gradients of one optimizer: one per parameter, with a hook. Parameters may come and go."""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch

from hororing._adapters.optimizer_options import Reduction
from hororing._requests.persistent import QUEUED, SENT
from hororing._requests.process_sets import check_member
from hororing.torch._optimizer.first_reduction import FirstReduction, Watcher
from hororing.torch._optimizer.gradient import Gradient
from hororing.torch._optimizer.grouping import Entry, Grouping
from hororing.torch._optimizer.sharing import Owner, Sharing
from hororing.torch._optimizer.step import Listener, Phase, Step, collect
from hororing.torch._optimizer.weights import Weights
from hororing.torch._tensor.uncompiled import leave_uncompiled

_NUMBER = 28  # the lowest bit of a handle's number (csrc/engine/handle_table.h)


class Following(Listener, Owner, ABC):
    """Base of what reduces, and listens to a step.

    `named` gives names to parameters by identity, `prefix` to all others. All must be the same on
    every rank. Only the hooks are thread-safe. Call `release` to end it before its optimizer.
    """

    gradient_type: type[Gradient] = Gradient

    def __init__(
        self,
        options: Reduction,
        passes: int,
        optimizer: torch.optim.Optimizer,
        named: Sequence[tuple[str, torch.Tensor]],
        prefix: str,
        grouping: Grouping,
    ) -> None:
        self.options = options
        self.members = check_member(options.process_set, "DistributedOptimizer")
        weights = Weights(f"{prefix}.sum_of_weights", options.process_set, self.members)
        self.step = Step(passes, weights, self)
        self.grouping = grouping
        self.sharing = Sharing(self, (options.op, self.members))
        self._optimizer = weakref.ref(optimizer)
        self._names = {id(param): (name, param) for name, param in named}
        self._prefix = prefix
        self._gradients: dict[int, Entry] = {}  # by id(parameter)
        grouping.begin(self.step, self._gradients)
        # As last seen by `follow`: the parameters, and the entries to reduce.
        self._followed: list[torch.Tensor] = []
        self._entries: list[Entry] = []
        self.reductions = 0
        self.check = FirstReduction(self, optimizer)
        self._watch: Watcher | None = None
        self.release = weakref.finalize(optimizer, self._release)
        self.release.atexit = False
        self.follow()
        grouping.form(grouping.wanted)

    def follow(self) -> list[Entry]:
        """Return the entries to reduce, for the optimizer's current parameters."""
        optimizer = self._optimizer()
        assert optimizer is not None
        groups = optimizer.param_groups
        params = [param for group in groups for param in group["params"]]
        if len(params) == len(self._followed) and all(map(is_, params, self._followed)):
            return self._entries
        held: dict[int, Entry] = {}  # once, also those that a group has twice
        for number, group in enumerate(groups):
            for index, param in enumerate(group["params"]):
                held[id(param)] = self._entry(param, f"{self._prefix}.{number}.{index}")
        if self.sharing.hold(held):
            self.arrange()
        # What the optimizer no longer has is finished once more, if its hook has sent it.
        gone = self._gradients.keys() - held.keys()
        sent = [entry for key in gone if (entry := self._gradients[key])[1].state >= QUEUED]
        self._entries = [each for key, each in held.items() if self.sharing.reduces(key)] + sent
        self._followed = params
        self.grouping.follow(self._entries)
        return self._entries

    def _entry(self, param: torch.Tensor, default_name: str) -> Entry:
        entry = self._gradients.get(id(param))
        if entry is None:
            name, _ = self._names.get(id(param), (default_name, None))
            gradient = self.gradient_type(name, param, self.step, self.options, self.members)
            entry = self._gradients[id(param)] = param, gradient
        return entry

    def arrange(self) -> None:
        """Add and remove hooks."""
        for key, (param, gradient) in self._gradients.items():
            if self.sharing.in_step or not self.sharing.reduces(key):
                gradient.unhook()
            else:
                self._hook(param, gradient)

    def _hook(self, param: torch.Tensor, gradient: Gradient) -> None:
        """Add hooks if there are none, and the parameter has gradients or may get some."""
        if gradient.hooks or not _may_have_gradients(param):
            return
        # Backward may run inside a function that torch.compile traces.
        leave_uncompiled(type(gradient).on_gradient)
        register: Any = param.register_post_accumulate_grad_hook  # torch declares no types
        with unfrozen(param):
            self.grouping.before_hook(param)
            gradient.hooks.append(register(gradient.on_gradient))
        self._weigh(param, gradient)

    def _weigh(self, param: torch.Tensor, gradient: Gradient) -> None:
        """Make the gradient's request a weighted average, or a plain one."""
        weights = self.step.weights
        gradient.weigh(None if weights.weight is None else weights.cell)
        if weights.weighs_passes and len(gradient.hooks) == 1:
            before = partial(self.step.weigh, gradient.name, weakref.ref(param))
            with unfrozen(param):
                gradient.hooks.append(param.register_hook(before))  # type: ignore[no-untyped-call]

    def set_weight(self, weight: float | None) -> None:
        """Set the weight of later passes, or none. REQUIRES: no pass runs."""
        changes = self.step.weights.set(weight, self.step.passes, self.step.ended)
        if changes or weight is not None:
            entries = self.follow()
            for param, gradient in entries if changes else ():
                self._weigh(param, gradient)

    def _release(self) -> None:
        """Remove everything from parameters and core, and keep no parameter."""
        self.abandon()
        self.step.listener = None
        for _, gradient in self._gradients.values():
            gradient.unhook()
        self.grouping.release()
        self._gradients.clear()
        self._names, self._entries, self._followed = {}, [], []
        self.sharing.hold(())

    @property
    def watch(self) -> Watcher | None:
        """What a guard does in each reduction."""
        return self._watch

    @watch.setter
    def watch(self, watch: Watcher | None) -> None:
        self._watch = watch
        self.step.look = getattr(watch, "look", None)

    def send_checks(self) -> None:
        """Send what ranks compare in this reduction. `receive_checks` waits for it."""
        if self.check.is_due:
            self.check.send(self, self.step.failures)
        if self.watch is not None:
            with collect(self.step.failures):
                self.watch.send(self.reductions)

    def receive_checks(self) -> None:
        """Append the errors of what is compared to the failures of the step."""
        self.check.receive(self.step.failures, self.abandon)

    def receive_watch(self) -> None:
        """The same for a guard, which also looks at what is reduced."""
        if self.watch is not None:
            with collect(self.step.failures):
                self.watch.receive()

    # -- in a step ------------------------------------------------------------------------------

    def gradient_repeated(self) -> None:
        """Classify all gradients again: one was changed while in flight."""
        for _, gradient in self._gradients.values():
            if gradient.fires_once:
                gradient.reclassify()

    @property
    @abstractmethod
    def synchronized(self) -> bool:
        """Whether `synchronize` has nothing to do."""

    @abstractmethod
    def synchronize(self) -> None:
        """Reduce what is not reduced."""

    @property
    def in_flight(self) -> list[str]:
        """Names of the parameters whose gradients are being reduced."""
        if self.step.phase in (Phase.IDLE, Phase.REDUCED):
            return []
        return [each.name for _, each in self._gradients.values() if each.state >= QUEUED]

    @property
    def reduced(self) -> dict[str, torch.Tensor]:
        """The parameters whose gradients it reduces, by name."""
        return {gradient.name: param for param, gradient in self._entries}

    @property
    def orders(self) -> dict[str, int]:
        """The place of each gradient in the order in which this rank has sent them."""
        return {each.name: each.latest >> _NUMBER for _, each in self._entries}

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """The name of each parameter."""
        return {param: gradient.name for param, gradient in self._gradients.values()}

    @property
    def handles(self) -> dict[torch.Tensor, int]:
        """The handle of each gradient that is being reduced; 0 until its group is complete."""
        return {
            param: gradient.handle or gradient.route.handle
            for param, gradient in self._gradients.values()
            if gradient.state == SENT
        }

    def restart(self, passes: int | None = None) -> None:
        """Count backward passes from the beginning; gradients are no longer synchronized."""
        step = self.step
        if step.phase is Phase.REDUCED:
            step.phase = Phase.IDLE
        step.ended = 0
        step.weights.reset_passes()
        self.sharing.begin_step()
        if passes is None and step.phase is Phase.IDLE:
            return
        step.passes = passes or step.passes
        self.reset_unsent()

    def reset_unsent(self) -> None:
        """Forget the gradients that were not sent."""
        self.step.drop_queue()
        for _, gradient in self._gradients.values():
            if gradient.state != SENT:
                gradient.reset()

    def abandon(self) -> None:
        """Forget everything in flight."""
        for _, gradient in self._gradients.values():
            gradient.abandon()
        self.step.abandon()


def _may_have_gradients(param: torch.Tensor) -> bool:
    """Whether the parameter has gradients, or will have them once it is unfrozen."""
    possible = param.is_floating_point() or param.is_complex()
    return param.requires_grad or (possible and not param.is_inference())


@contextlib.contextmanager
def unfrozen(param: torch.Tensor) -> Iterator[None]:
    """Let torch add a hook to a parameter that is frozen now."""
    needs_gradient = param.requires_grad
    param.requires_grad_(True)
    try:
        yield
    finally:
        param.requires_grad_(needs_gradient)
