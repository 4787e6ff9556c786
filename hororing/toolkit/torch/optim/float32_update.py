"""Updates of 16-bit parameters in float32: what `LARS` and `LAMB` do, and any torch optimizer can.

While an optimizer updates, a float32 tensor stands in for every float16 or bfloat16 parameter, in
its groups and as key of its state; gradients are cast, and divided by the scale of a GradScaler,
before anything is computed from them. So state, norms and the update itself are float32. At all
other times (for learning rate schedulers, DistributedOptimizer, state_dict) the optimizer holds the
parameters.

Stand-ins that are kept from step to step are master weights (Micikevicius et al., "Mixed precision
training", 2018, arXiv:1710.03740). Otherwise they are made from the parameters anew, and rounded
back at random, which loses no small updates either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch

from hororing.toolkit.large_batch.stochastic_rounding import StochasticRounding, checked_rounding
from hororing.toolkit.torch.optim.rounding import round_into

SHORT: Final = (torch.float16, torch.bfloat16)
MASTER: Final = "float32_weight"  # in the state of a parameter
SCALES: Final = ("grad_scale", "found_inf")  # set by GradScaler while it calls `step`

Closure = Callable[[], Any] | None
AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


class Float32Update(torch.optim.Optimizer):
    """A mixin that adds float32 updates of 16-bit parameters to an optimizer's class."""

    # GradScaler leaves gradients as they are and sets `grad_scale` and `found_inf` instead:
    # dividing them in float16 would flush small ones to zero.
    _step_supports_amp_scaling = True
    _max_norm: float | None = None

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        rounding: StochasticRounding | None,
        max_norm: float | None,
    ) -> None:
        self._max_norm = checked_max_norm(max_norm)
        super().__init__(params, {**defaults, **_rounding_defaults(rounding)})

    def __getstate__(self) -> dict[str, Any]:
        """Also for copies; torch's leaves out other attributes."""
        return {**super().__getstate__(), "_max_norm": self._max_norm}

    def step(self, closure: Closure = None) -> Any:
        """Update the parameters; `closure` computes the loss, once, and it is returned.

        Nothing happens where a GradScaler found infinities.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # torch's own steps would read these, too.
        given: dict[str, Any] = {
            name: self.__dict__.pop(name) for name in SCALES if name in self.__dict__
        }
        found = given.get("found_inf")
        try:
            if found is None or not bool(found):
                with torch.no_grad(), self._in_float32(given.get("grad_scale")):
                    self._update()
        finally:
            self.__dict__.update(given)  # GradScaler deletes them
        return loss

    def _update(self) -> None:
        """Update all parameters that have a gradient; all of them have at least 32 bits."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but keep or make float32 state, which torch would cast."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, param in zip(saved, self._all(), strict=True):
            if param.dtype in SHORT:
                for key, value in state_dict["state"].get(number, {}).items():
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        dtype = torch.promote_types(value.dtype, torch.float32)
                        self.state[param][key] = value.detach().to(param.device, dtype, copy=True)

    def _all(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @contextlib.contextmanager
    def _in_float32(self, scale: torch.Tensor | None) -> Iterator[None]:
        inverse = None if scale is None else scale.double().reciprocal().float()
        held = [group["params"] for group in self.param_groups]
        stand_ins: list[tuple[torch.Tensor, torch.Tensor, dict[str, Any], int]] = []
        number = -1
        try:
            for group in self.param_groups:
                params = []
                for param in group["params"]:
                    number += 1
                    if param.grad is None or param.dtype not in SHORT:
                        if param.grad is not None and inverse is not None:
                            param.grad.mul_(inverse.to(param.grad.device))
                        params.append(param)
                        continue
                    params.append(self._stand_in(param, inverse, group))
                    stand_ins.append((param, params[-1], group, number))
                group["params"] = params
            if self._max_norm is not None:
                torch.nn.utils.clip_grad_norm_(self._all(), self._max_norm)
            yield
            for param, stand_in, group, at in stand_ins:
                _write_back(param, stand_in, group, at)
        finally:
            for group, params in zip(self.param_groups, held, strict=True):
                group["params"] = params
            for param, stand_in, group, _ in stand_ins:
                state = self.state.pop(stand_in, {})
                if group.get("rounding_seed") is None:
                    state[MASTER] = stand_in
                stand_in.grad = None
                self.state[param] = state
        for group in self.param_groups:
            group["rounding_step"] = group.get("rounding_step", 0) + 1

    def _stand_in(
        self, param: torch.Tensor, inverse: torch.Tensor | None, group: dict[str, Any]
    ) -> torch.Tensor:
        """Return a float32 tensor with the parameter's value, gradient and state."""
        state = self.state.pop(param, {})
        kept = state.pop(MASTER, None)
        if kept is None or group.get("rounding_seed") is not None:
            stand_in = param.detach().float()
        else:
            # Values that others have written into the parameter since (a broadcast, an average, a
            # checkpoint) are kept.
            same = kept.to(param.dtype) == param.detach()
            stand_in = kept if bool(same.all()) else kept.where(same, param.detach().float())
        if state:
            self.state[stand_in] = state
        gradient = param.grad
        assert gradient is not None
        stand_in.grad = gradient.detach().float()
        if inverse is not None:
            stand_in.grad.mul_(inverse.to(stand_in.device))
        return stand_in


def _write_back(
    param: torch.Tensor, stand_in: torch.Tensor, group: dict[str, Any], number: int
) -> None:
    seed = group.get("rounding_seed")
    if seed is None:
        param.copy_(stand_in)
    else:
        round_into(param, stand_in, seed=seed, tensor=number, step=group["rounding_step"])


def _rounding_defaults(rounding: StochasticRounding | None) -> dict[str, Any]:
    """In the groups, since torch saves and restores those."""
    checked = checked_rounding(rounding)
    return {"rounding_seed": None if checked is None else checked.seed, "rounding_step": 0}


def checked_max_norm(max_norm: float | None) -> float | None:
    """Return `max_norm`; ValueError unless it is None or positive."""
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be positive, or None: no clipping")
    return max_norm


def with_float32_update(
    optimizer: AnyOptimizer,
    *,
    rounding: StochasticRounding | None = None,
    max_norm: float | None = None,
) -> AnyOptimizer:
    """Make `optimizer` update float16 and bfloat16 parameters in float32, and return it.

    Its state becomes float32, too, and is saved and loaded as such. Use it before
    `DistributedOptimizer`. `LARS` and `LAMB` of this package do the same by themselves. Save its
    `state_dict()`: the optimizer itself cannot be pickled.

    Parameters
    ----------
    optimizer : AnyOptimizer
        Any torch optimizer whose step calls its closure once (not LBFGS).
    rounding : StochasticRounding, optional
        None: float32 master weights are kept (4 bytes per parameter). Otherwise there are no
        master weights, and parameters are rounded at random.
    max_norm : float, optional
        Clip the norm of all gradients together, in float32; with a GradScaler, the only way to
        clip float16 gradients.

    Examples
    --------
    >>> model = model.to(torch.bfloat16)
    >>> optimizer = with_float32_update(torch.optim.AdamW(model.parameters()))
    >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates its closure several times a step: it cannot be wrapped")
    if isinstance(optimizer, Float32Update):
        raise ValueError(
            "optimizer updates in float32 already; LARS and LAMB take rounding and max_norm"
        )
    if hasattr(optimizer, "skip_synchronize"):
        raise ValueError("use with_float32_update before DistributedOptimizer, not after it")
    if any(state.get("step", 1) != 0 for state in optimizer.state.values()):
        raise ValueError("optimizer has taken steps already; use with_float32_update first")
    for param, state in optimizer.state.items():  # Adagrad is made with it
        if param.dtype in SHORT:
            state.update({k: v.float() for k, v in state.items() if isinstance(v, torch.Tensor)})
    options = _rounding_defaults(rounding)
    optimizer.defaults.update(options)
    for group in optimizer.param_groups:
        group.update(options)
    base: Any = type(optimizer)
    # The hooks that torch has put around it are around the new one.
    inner = base.step.__wrapped__ if getattr(base.step, "hooked", False) else base.step
    step: Any = torch.optim.Optimizer.profile_hook_step(Float32Update.step)
    step.hooked = True
    namespace = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "step": step,
        "_update": lambda self: inner(self),
        "_max_norm": checked_max_norm(max_norm),
    }
    own = optimizer.__dict__.get("step")
    if own is not None and hasattr(own, "_wrapped_by_lr_sched"):
        # A scheduler wrapped the step of this instance; as in DistributedOptimizer.
        raise ValueError("use with_float32_update before a learning rate scheduler is made")
    optimizer.__class__ = type(base.__name__, (Float32Update, base), namespace)
    return optimizer
