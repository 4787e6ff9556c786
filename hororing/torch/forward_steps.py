"""Updates that wait for the next forward pass: each runs just before the parameter is used.

In the order in which modules' forward methods begin, parameters are needed. That is learned from
the forward passes before the first step, and gives the gradients their priorities; until then the
order of registration does. A parameter's update is due

    in the pre-hook of the modules that hold it, if their forward was called while that was learned
    in that of the nearest module around them whose forward was, if not: who holds the parameter
        is not always who calls (the output projection of nn.MultiheadAttention, say)
    in the first pre-hook of all, if there is none

and all updates are due where gradients are not recorded: an evaluation may go another way.
Knows nothing of how gradients travel (hororing/torch/reducer.py), or what an update is.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from hororing.torch.gradient import Slot
from hororing.torch.reducer import finish_all
from hororing.torch.uncompiled import uncompiled

if TYPE_CHECKING:
    from hororing.torch.forward_optimizer import StepsInForward

_all_steps: weakref.WeakSet[ForwardSteps] = weakref.WeakSet()


def finish_everywhere() -> None:
    """Apply every update that is due: somebody is about to look at parameters."""
    for steps in list(_all_steps):
        steps.finish()


@dataclasses.dataclass(slots=True)
class Due:
    """A parameter whose gradient is in flight, and what its update needs."""

    param: torch.Tensor
    slot: Slot
    group: int  # position of its group
    options: dict[str, Any]  # of the group, as they were when step() was called
    version: int | None  # of the gradient then; None: not to be told
    zero: bool | None = None  # zero_grad(set_to_none) came after it

    def check(self) -> None:
        """Raise if somebody has written to what is being reduced."""
        keep = self.slot.prepared.keep if self.slot.prepared is not None else None
        if self.version is not None and keep is not None and keep._version != self.version:
            raise RuntimeError(
                f"gradient of '{self.slot.name}' was written to while it was being reduced "
                "(step_in_forward: step() does not wait); use optimizer.zero_grad(), which knows, "
                "or call optimizer.finish_step() before"
            )


class ForwardHook:
    """The forward pre-hook of one module. Copies of the module get one that does nothing."""

    __slots__ = ("keys", "place", "steps")

    def __init__(self, steps: ForwardSteps | None = None) -> None:
        self.steps = steps
        self.place = -1  # in the order of first calls; -1: its forward was not called
        self.keys: list[int] = []  # ids of parameters whose updates are due here

    def __call__(self, *_: Any) -> None:
        """Begin the forward pass of the module."""
        if self.steps is not None:
            self.steps.before_forward(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardHook:
        return ForwardHook(*self._check_copied())

    def __reduce__(self) -> tuple[type[ForwardHook], tuple[()]]:
        return ForwardHook, self._check_copied()

    def _check_copied(self) -> tuple[()]:
        if self.steps is not None and self.steps.any_due:
            raise RuntimeError(
                "the model was copied or pickled while updates of its parameters are due "
                "(step_in_forward); call optimizer.finish_step() before"
            )
        return ()


class ForwardSteps:
    """The updates of one optimizer that are due, and the hooks of `model` that apply them.

    Hooks may run in any thread. While something is due the hooks keep the optimizer alive.
    """

    def __init__(self, optimizer: StepsInForward, model: torch.nn.Module) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._kept: StepsInForward | None = None  # while something is due
        self._model = weakref.ref(model)
        self._hooks: weakref.WeakKeyDictionary[torch.nn.Module, ForwardHook]
        self._hooks = weakref.WeakKeyDictionary()
        self._due: dict[int, Due] = {}  # by id(param)
        self._called = 0  # modules, while the order is learned
        self._learned = False
        self._early: list[int] = []  # ids of parameters that are due in the first hook of all
        self._lock = threading.RLock()
        self.follow()
        _all_steps.add(self)

    def follow(self) -> None:
        """Hook the modules that are new."""
        model = self._model()
        for module in model.modules() if model is not None else ():
            if module in self._hooks:
                continue
            hook = self._hooks[module] = ForwardHook(self)
            # Before all others: they may make weights of parameters (weight_norm).
            module.register_forward_pre_hook(hook, prepend=True)
            untyped: Any = module
            untyped.register_state_dict_pre_hook(_StateHook(self))
            untyped.register_load_state_dict_pre_hook(_StateHook(self))
        if self._learned:
            self._assign()

    # -- order -----------------------------------------------------------------------------------

    def learn(self) -> bool:
        """Fix the order, if there is one that was not known before. Whether that is so."""
        if self._learned or self._called == 0:
            return False
        self._learned = True
        self._assign()
        return True

    def _assign(self) -> None:
        """Find out which hooks apply which updates."""
        for hook in self._hooks.values():
            hook.keys = []
        self._early = []
        model = self._model()
        by_path: dict[str, ForwardHook] = {}
        found: dict[int, list[ForwardHook]] = {}
        modules = model.named_modules(remove_duplicate=False) if model is not None else ()
        for path, module in modules:
            if module not in self._hooks:
                continue
            by_path[path] = self._hooks[module]
            around, calling = path, self._hooks[module]
            while calling.place < 0 and around:
                around = around.rpartition(".")[0]
                calling = by_path.get(around, calling)
            for param in module._parameters.values():
                if param is not None:
                    places = found.setdefault(id(param), [])
                    if calling.place >= 0:
                        places.append(calling)
        for key, hooks in found.items():
            for hook in hooks:
                hook.keys.append(key)
            if not hooks:
                self._early.append(key)

    def priorities(self) -> dict[int, int]:
        """Return the priority of each parameter, by id. All are negative: who waits for something
        else waits for it now.
        """
        places: dict[int, int] = {}
        if self._learned:
            for hook in self._hooks.values():
                for key in hook.keys:
                    places[key] = min(hook.place, places.get(key, hook.place))
            places.update(dict.fromkeys(self._early, -1))
        else:
            model = self._model()
            for place, module in enumerate(model.modules() if model is not None else ()):
                for param in module._parameters.values():
                    places.setdefault(id(param), place)
        return {key: -2 - place for key, place in places.items()}

    # -- updates ---------------------------------------------------------------------------------

    @property
    def any_due(self) -> bool:
        """Whether an update is due."""
        return bool(self._due)

    def is_due(self, param: torch.Tensor) -> bool:
        """Whether the update of this one is."""
        return id(param) in self._due

    def defer(self, due: Iterable[Due]) -> None:
        """Apply these when they are needed. REQUIRES: nothing is due."""
        with self._lock:
            self._due = {id(each.param): each for each in due}
            for each in self._due.values():
                each.slot.due = True
                each.slot.left = 0  # another gradient before its update is an error
            self._kept = self._optimizer() if self._due else None

    def zero_later(self, set_to_none: bool) -> None:
        """Reset the gradients of what is due when that has been applied."""
        with self._lock:
            for each in self._due.values():
                each.zero = set_to_none

    @uncompiled
    def before_forward(self, hook: ForwardHook) -> None:
        """Apply what the module is about to use."""
        recorded = torch.is_grad_enabled()
        if not self._learned and recorded and hook.place < 0:
            hook.place = self._called
            self._called += 1
        if not self._due:
            return
        if self._learned and recorded:
            self.finish(hook.keys)
            if self._early:
                self.finish(self._early)
        else:
            self.finish()

    @uncompiled
    def finish(self, keys: Iterable[int] | None = None) -> None:
        """Wait for the gradients of these parameters, by id, and update them; None: of all.

        An error is raised once; the parameters of this call are not updated then. After a
        KeyboardInterrupt they are still due.
        """
        with self._lock:
            wanted = self._due if keys is None else keys
            due = [self._due[key] for key in wanted if key in self._due]
            if due:
                self._finish(due)

    def _finish(self, due: list[Due]) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None
        failures: list[Exception] = []
        # As outside the forward pass: state that is made here is used there.
        with torch.inference_mode(False), torch.no_grad():
            flying = [each for each in due if each.slot.sent]  # others: before an interrupt
            dropped = [each for each in flying if each.param.grad is None]
            for each in dropped:
                each.zero = True  # somebody did it without zero_grad()
            try:
                for each in flying:
                    each.check()
            except RuntimeError as error:
                failures.append(error)
            handles = [each.slot.prepared.handle for each in flying if each.slot.prepared]
            finish_all(
                [(each.param, each.slot) for each in flying],
                [handle for handle in handles if handle],
                failures,
            )
            for each in due:
                each.slot.due = False
                del self._due[id(each.param)]
            if not self._due:
                self._kept = None
            if failures:
                raise failures[0]
            optimizer._update(due)
            for each in due:
                _zero(each.param, each.zero)


class _StateHook:
    """Before parameters are saved or replaced."""

    __slots__ = ("_steps",)

    def __init__(self, steps: ForwardSteps | None = None) -> None:
        self._steps = steps

    def __call__(self, *_: Any) -> None:
        if self._steps is not None:
            self._steps.finish()

    def __deepcopy__(self, memo: dict[int, Any]) -> _StateHook:
        return _StateHook()

    def __reduce__(self) -> tuple[type[_StateHook], tuple[()]]:
        return _StateHook, ()


def _zero(param: torch.Tensor, set_to_none: bool | None) -> None:
    if set_to_none is None or param.grad is None:
        return
    if set_to_none:
        param.grad = None
    else:
        param.grad.zero_()
