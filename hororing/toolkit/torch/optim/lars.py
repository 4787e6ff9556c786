"""LARS: layer-wise adaptive rate scaling."""

from __future__ import annotations

from typing import Any

import torch

from hororing.toolkit.torch.optim.float32_update import Float32Update
from hororing.toolkit.torch.optim.layerwise import norms, tensors_by_type
from hororing.toolkit.torch.optim.rounding import StochasticRounding


class LARS(Float32Update):
    """Momentum SGD with a rate for each tensor, for large batches.

    For a tensor w with gradient g, weight decay d and the current learning rate ``lr``::

        trust = trust_coefficient * |w| / (|g| + d * |w| + eps)      1 where |w| or |g| is 0
        v     = momentum * v + lr * trust * (g + d * w)
        w     = w - v

    (You, Gitman, Ginsburg: "Large batch training of convolutional networks", 2017,
    arXiv:1708.03888.) Published implementations differ; each difference is an option.

    Parameters
    ----------
    params : iterable
        Parameters or groups. A group has one more option than those below, ``adapt`` (True);
        False makes trust 1. Biases and parameters of batch-norm must neither adapt nor decay:
        use ``parameter_groups(model, ...)``. float16 and bfloat16 are updated in float32.
    lr : float or torch.Tensor
        Learning rate; schedules change it.
    momentum : float, optional
        From 0 to below 1.
    weight_decay : float, optional
        D, coupled: it is part of the gradient.
    trust_coefficient : float, optional
        The paper's eta.
    eps : float, optional
        0 in the paper and in the MLPerf reference; added to the denominator.
    denominator : str, optional
        "paper": |g| + d |w| + eps; "sum": |g + d w| + eps.
    momentum_form : str, optional
        "scaled": the rate is inside v, as above (the paper, TensorFlow, MLPerf); "unscaled":
        ``u = momentum * u + g + d * w``, ``w = w - lr * trust * u``.
    clip : bool, optional
        Trust is at most 1 / lr, so that the rate is at most 1 (LARC): lr * trust becomes
        min(trust, lr).
    nesterov : bool, optional
        Look ahead: momentum * v + lr * trust * (g + d * w) in place of v.
    rounding : StochasticRounding, optional
        Of 16-bit parameters; None keeps float32 master weights. See `with_float32_update`.
    max_norm : float, optional
        Clip the norm of all gradients together, before anything else.

    Notes
    -----
    With d = eps = 0 the step does not depend on the scale of g. Norms are float32; those of more
    than 10**7 elements are added up in float64. Gradients must be dense.

    Examples
    --------
    >>> optimizer = LARS(parameter_groups(model, weight_decay=5e-5), lr=7.4)
    >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        denominator: str = "paper",
        momentum_form: str = "scaled",
        clip: bool = False,
        nesterov: bool = False,
        rounding: StochasticRounding | None = None,
        max_norm: float | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient, "eps": eps, "denominator": denominator,
            "momentum_form": momentum_form, "clip": clip, "nesterov": nesterov, "adapt": True,
        }  # fmt: skip
        super().__init__(params, defaults, rounding, max_norm)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own; ValueError for wrong ones."""
        options = {**self.defaults, **param_group}
        for name in ("lr", "weight_decay", "eps", "trust_coefficient"):
            if not options[name] >= 0:
                raise ValueError(f"LARS: {name}={options[name]} must not be negative")
        if not 0 <= options["momentum"] < 1:
            raise ValueError(f"LARS: momentum={options['momentum']} must be from 0 to below 1")
        if options["nesterov"] and options["momentum"] == 0:
            raise ValueError("LARS: nesterov=True needs a momentum")
        for name, allowed in (
            ("denominator", ("paper", "sum")),
            ("momentum_form", ("scaled", "unscaled")),
        ):
            if options[name] not in allowed:
                raise ValueError(f"LARS: {name}={options[name]!r} must be one of {allowed}")
        super().add_param_group(param_group)

    def _update(self) -> None:
        for group in self.param_groups:
            for params in tensors_by_type(group["params"], "LARS"):
                self._update_tensors(params, group)

    def _update_tensors(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
        raw: list[Any] = [param.grad for param in params]
        grads: Any = raw if decay == 0 else torch._foreach_add(raw, params, alpha=decay)
        rates = self._rates(params, raw, grads, group) if group["adapt"] else [lr] * len(params)

        if group["momentum_form"] == "scaled" or momentum == 0:
            change: Any = torch._foreach_mul(grads, rates)
            if momentum != 0:
                buffers = self._momentum_buffers(params)
                torch._foreach_mul_(buffers, momentum)
                torch._foreach_add_(buffers, change)
                change = (
                    torch._foreach_add(change, buffers, alpha=momentum)
                    if group["nesterov"]
                    else buffers
                )
        else:
            buffers = self._momentum_buffers(params)
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, grads)
            ahead: Any = (
                torch._foreach_add(grads, buffers, alpha=momentum) if group["nesterov"] else buffers
            )
            change = torch._foreach_mul(ahead, rates)
        torch._foreach_sub_(params, change)

    def _momentum_buffers(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        for param in params:
            if "momentum_buffer" not in self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        return [self.state[param]["momentum_buffer"] for param in params]

    @staticmethod
    def _rates(
        params: list[torch.Tensor],
        raw: list[torch.Tensor],
        grads: list[torch.Tensor],
        group: dict[str, Any],
    ) -> list[torch.Tensor]:
        """Learning rate times trust, of each parameter, on its device, which avoids a wait."""
        weight = norms(params)
        if group["denominator"] == "paper":
            gradient = norms(raw)
            denominator = gradient + group["weight_decay"] * weight + group["eps"]
        else:
            gradient = norms(grads)
            denominator = gradient + group["eps"]
        adapts = (weight > 0) & (gradient > 0)
        lr = group["lr"]
        rate = lr * group["trust_coefficient"] * weight / denominator.where(adapts, 1)
        if group["clip"]:
            trust = group["trust_coefficient"] * weight / denominator.where(adapts, 1)
            rate = trust.clamp(max=lr)
        return list(torch.where(adapts, rate, lr).to(weight.dtype).unbind())
