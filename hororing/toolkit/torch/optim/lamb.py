"""LAMB: layer-wise adaptive moments for batch training."""

from __future__ import annotations

from typing import Any

import torch

from hororing.toolkit.torch.optim.float32_update import Float32Update
from hororing.toolkit.torch.optim.layerwise import norms, tensors_by_type
from hororing.toolkit.torch.optim.rounding import StochasticRounding


class LAMB(Float32Update):
    """Adam with a rate for each tensor, for large batches.

    For a tensor w with gradient g, weight decay d and the current learning rate ``lr``::

        m = beta1 * m + (1 - beta1) * g            v = beta2 * v + (1 - beta2) * g**2
        r = m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps)
        u = r + d * w
        w = w - lr * phi(|w|) / |u| * u             the ratio is 1 where |w| or |u| is 0

    (You et al.: "Large batch optimization for deep learning: training BERT in 76 minutes", 2020,
    arXiv:1904.00962, algorithm 2.) ``keras.optimizers.Lamb`` applies its weight decay outside
    the ratio instead: there |u| is |r|, and lr * d * w is subtracted first, whatever the ratio is.

    Parameters
    ----------
    params : iterable
        Parameters or groups. A group has one more option than those below, ``adapt`` (True);
        False makes the ratio 1, which is AdamW. Use ``parameter_groups(model, ...)`` to exclude
        biases and parameters of batch-norm. float16 and bfloat16 are updated in float32.
    lr : float or torch.Tensor, optional
        Learning rate; schedules change it.
    betas : tuple of float, optional
        Decay of the two moments.
    eps : float, optional
        Added to the root.
    weight_decay : float, optional
        D, inside the ratio.
    phi : tuple of float, optional
        None: phi(x) = x; or (low, high), such as (0, 10): x is clipped to that range.
    rounding : StochasticRounding, optional
        Of 16-bit parameters; None keeps float32 master weights. See `with_float32_update`.
    max_norm : float, optional
        Clip the norm of all gradients together, before anything else.

    Examples
    --------
    >>> optimizer = LAMB(parameter_groups(model, weight_decay=0.01), lr=1e-3)
    >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        phi: tuple[float, float] | None = None,
        rounding: StochasticRounding | None = None,
        max_norm: float | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "phi": phi,
            "adapt": True,
        }  # fmt: skip
        super().__init__(params, defaults, rounding, max_norm)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own; ValueError for wrong ones."""
        options = {**self.defaults, **param_group}
        for name in ("lr", "eps", "weight_decay"):
            if not options[name] >= 0:
                raise ValueError(f"LAMB: {name}={options[name]} must not be negative")
        if len(options["betas"]) != 2 or not all(0 <= beta < 1 for beta in options["betas"]):
            raise ValueError(
                f"LAMB: betas={options['betas']} must be two numbers from 0 to below 1"
            )
        phi = options["phi"]
        if phi is not None and not (
            isinstance(phi, list | tuple) and len(phi) == 2 and 0 <= phi[0] < phi[1]
        ):
            raise ValueError(f"LAMB: phi={phi!r} must be None or (low, high) with 0 <= low < high")
        super().add_param_group(param_group)

    def _update(self) -> None:
        for group in self.param_groups:
            for params in tensors_by_type(group["params"], "LAMB"):
                self._update_tensors(params, group)

    def _update_tensors(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        states = [self.state[param] for param in params]
        for param, state in zip(params, states, strict=True):
            if "step" not in state:
                state["step"] = torch.tensor(0.0, device="cpu")  # as in torch's own optimizers
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
            state["step"] += 1
        grads: list[Any] = [param.grad for param in params]
        first = [state["exp_avg"] for state in states]
        second = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)

        steps = [int(state["step"]) for state in states]
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, [(1 - beta2**step) ** 0.5 for step in steps])
        torch._foreach_add_(roots, group["eps"])
        update: Any = torch._foreach_div(first, [1 - beta1**step for step in steps])
        torch._foreach_div_(update, roots)
        if group["weight_decay"] != 0:
            torch._foreach_add_(update, params, alpha=group["weight_decay"])

        rates: list[Any] = [group["lr"]] * len(params)
        if group["adapt"]:
            weight, length = norms(params), norms(list(update))
            adapts = (weight > 0) & (length > 0)
            phi = weight if group["phi"] is None else weight.clamp(*group["phi"])
            ratio = torch.where(adapts, phi / length.where(adapts, 1), 1)
            rates = list((group["lr"] * ratio).to(weight.dtype).unbind())
        torch._foreach_sub_(params, torch._foreach_mul(update, rates))
