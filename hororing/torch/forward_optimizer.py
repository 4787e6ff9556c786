"""An optimizer whose step is taken in the next forward pass, module by module.

`step()` sends what the hooks of gradients have not, notes the options of the groups, and returns.
Then hororing/torch/forward_steps.py has each parameter updated just before it is used, so that the
forward pass begins while later layers' gradients are still on their way. Each update is one call of
the wrapped optimizer's `step` with the groups cut down to some parameters: the same numbers, where
the update of a parameter depends on that parameter alone.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from hororing.arguments import Adasum
from hororing.torch.forward_steps import Due, ForwardSteps
from hororing.torch.gradient_optimizer import Distributed, parameters


def check_step_in_forward(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, op: int, groups: object
) -> None:
    """Raise where an update cannot wait for the forward pass of `model`."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            "step_in_forward takes the model whose forward passes take the steps, a torch Module, "
            f"not {type(model).__name__}"
        )
    if isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_orig_mod"):
        raise ValueError(
            "step_in_forward needs the forward pre-hooks of modules, which compiled models do not "
            "run one by one; leave it out"
        )
    refused = {
        "op=Adasum": op == Adasum,
        "groups": groups is not None,
        "LBFGS, whose step needs all gradients": isinstance(optimizer, torch.optim.LBFGS),
    }
    for option in ("capturable", "differentiable"):
        refused[f"{option}=True"] = any(group.get(option) for group in optimizer.param_groups)
    for what, given in refused.items():
        if given:
            raise ValueError(f"step_in_forward cannot be used with {what}; leave one of them out")
    _check_held(model, parameters(optimizer))


def _check_held(model: torch.nn.Module, params: Sequence[torch.Tensor]) -> None:
    held = set(map(id, model.parameters()))
    strange = [position for position, param in enumerate(params) if id(param) not in held]
    if strange:
        raise ValueError(
            f"step_in_forward: the model does not hold {len(strange)} of {len(params)} parameters, "
            f"by position {strange[:8]}, so its forward pass would not update them; pass a model "
            "that holds all of them, or leave step_in_forward out"
        )


class StepsInForward(Distributed):
    """What such optimizers add to their class."""

    _step_model: weakref.ref[torch.nn.Module]  # of the class
    _steps: ForwardSteps | None  # None where this rank reduces with nobody

    def _become_distributed(self, passes: int, extra: Sequence[tuple[str, torch.Tensor]]) -> None:
        super()._become_distributed(passes, extra)
        self._steps = None
        model = self._step_model()
        if self._reducer is not None and model is not None:
            self._steps = ForwardSteps(self, model)
            self._reducer.prioritise(self._steps.priorities())

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_reducer" not in self.__dict__:
            raise TypeError(
                "an optimizer with step_in_forward cannot be copied, since its copy would need a "
                "copy of the model; make another one"
            )
        super().__setstate__(state)

    # -- steps -----------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Have the next forward pass take the wrapped optimizer's step, with today's options.

        After `synchronize()`, when all gradients are there, it is taken at once.
        """
        if closure is not None or kwargs:
            given = "a closure" if closure is not None else ", ".join(kwargs)
            raise ValueError(
                f"step() cannot take {given} with step_in_forward, which steps later; leave "
                "step_in_forward out"
            )
        steps, reducer = self._steps, self._reducer
        if steps is None or reducer is None:
            return super().step()
        steps.finish()
        if not self._should_synchronize or reducer.synchronized or reducer.shares_parameters():
            return super().step()
        self._opt_called = True  # learning rate schedulers look at it
        self._check_hooks()
        slots = {id(param): slot for param, slot in reducer.launch(self.param_groups)}
        now, later = [], []
        for number, group in enumerate(self.param_groups):
            options = {key: _copied(value) for key, value in group.items() if key != "params"}
            for param in group["params"]:
                slot = slots.get(id(param))
                if slot is not None:
                    watched = slot.view is None and slot.prepared is not None
                    version = param.grad._version if watched else None
                    later.append(Due(param, slot, number, options, version))
                elif param.grad is not None:  # frozen since
                    now.append(Due(param, reducer.slot(param), number, options, None))
        steps.defer(later)
        if steps.learn():
            reducer.prioritise(steps.priorities())
        self._start_over()
        if now:
            self._update(now)
        return None

    def _check_hooks(self) -> None:
        hooks = (
            self._optimizer_step_pre_hooks,
            self._optimizer_step_post_hooks,
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        )
        if any(hooks):
            raise ValueError(
                "step_in_forward cannot be used with hooks of optimizer.step(), which would run "
                "for every module; remove them, or leave step_in_forward out"
            )

    def _update(self, due: Sequence[Due]) -> None:
        """Take the wrapped optimizer's step for these parameters only."""
        chosen: dict[int, dict[str, Any]] = {}
        for each in due:
            group = chosen.setdefault(each.group, {**each.options, "params": []})
            group["params"].append(each.param)
        options = {each.group: each.options for each in due}
        groups = self.param_groups
        device = due[0].param.device.type
        with contextlib.ExitStack() as around:
            if torch.is_autocast_enabled(device):
                around.enter_context(torch.autocast(device, enabled=False))
            self.param_groups = [chosen[number] for number in sorted(chosen)]
            try:
                super(Distributed, self).step()
            finally:
                self.param_groups = groups
        for number, group in chosen.items():
            changed = [
                key for key in {*group, *options[number]} - {"params"}
                if group.get(key) is not options[number].get(key)
            ]  # fmt: skip
            if changed:
                raise ValueError(
                    f"step_in_forward cannot be used with {type(self).__name__}, whose step() "
                    f"changes {', '.join(sorted(changed))} of its parameter groups, and would do "
                    "so for every module; leave step_in_forward out"
                )

    def finish_step(self) -> None:
        """Take what is left of the latest step now: somebody is about to look at parameters."""
        if self._steps is not None:
            self._steps.finish()

    # -- who looks elsewhere finds finished parameters ---------------------------------------------

    def _reduce(self) -> None:
        self.finish_step()
        super()._reduce()

    def _reduce_for_scaler(self) -> None:
        raise ValueError(
            "step_in_forward cannot be used with torch.amp.GradScaler, which looks at all "
            "gradients before a step; leave step_in_forward out, or train in bfloat16 without one"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients; those of updates that are due afterwards.

        AssertionError while newer ones are being reduced.
        """
        steps = self._steps
        if steps is None or not steps.any_due:
            super().zero_grad(set_to_none)
            return
        self._check_nothing_in_flight("zero_grad() after backward()")
        self._start_over()
        steps.zero_later(set_to_none)
        with self._without(steps):
            super(Distributed, self).zero_grad(set_to_none)

    @contextlib.contextmanager
    def _without(self, steps: ForwardSteps) -> Iterator[None]:
        """Leave out the parameters whose updates are due."""
        groups = self.param_groups
        self.param_groups = [
            {**group, "params": [param for param in group["params"] if not steps.is_due(param)]}
            for group in groups
        ]
        try:
            yield
        finally:
            self.param_groups = groups

    def state_dict(self) -> dict[str, Any]:
        """Finish the step, then do as ever."""
        self.finish_step()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self.finish_step()
        return super().__getstate__()

    def _before_state_is_read(self) -> None:
        self.finish_step()
        super()._before_state_is_read()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Finish the step, then do as ever."""
        self.finish_step()
        super().load_state_dict(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model; their updates wait as well."""
        model = self._step_model()
        if "_reducer" in self.__dict__ and model is not None:
            given = param_group["params"]
            _check_held(model, [given] if isinstance(given, torch.Tensor) else list(given))
        super().add_param_group(param_group)
        if self._steps is not None and self._reducer is not None:
            self._steps.follow()
            self._reducer.prioritise(self._steps.priorities())


StepsInForward.step.hooked = True  # type: ignore[attr-defined]  # as that of Distributed


def _copied(value: Any) -> Any:
    """A schedule may write to a learning rate that is a tensor."""
    return value.clone() if isinstance(value, torch.Tensor) else value
