"""Which parameters decay and adapt, and residual blocks that begin as identities."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_NORMS: tuple[type[nn.Module], ...] = (
    _NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm,
)  # fmt: skip
if hasattr(nn, "RMSNorm"):  # from PyTorch 2.4 on
    _NORMS += (nn.RMSNorm,)

# Names, as regular expressions that are searched for; or a function of name and parameter.
Choice = Iterable[str] | Callable[[str, torch.Tensor], bool] | None


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    exclude_from_decay: Choice = None,
    exclude_from_adaptation: Choice = None,
) -> list[dict[str, Any]]:
    """Return parameter groups for `LARS` and `LAMB`, with and without decay and adaptation.

    Biases and parameters of normalisation layers should do neither: they are few, a decay of
    gamma changes nothing but the effective rate, and their norms say little about their gradients.
    (Goyal et al. 2017, arXiv:1706.02677, section 5.3; Jia et al. 2018, arXiv:1807.11205.)

    Parameters
    ----------
    model : nn.Module
        Any module. Parameters without requires_grad are left out, shared ones come once.
    weight_decay : float
        Of those that decay.
    exclude_from_decay, exclude_from_adaptation : Choice, optional
        Two lists, since implementations differ: regular expressions that are searched for in
        names, or a function (name, parameter) -> bool. None: parameters of at most one
        dimension, and those of normalisation layers. An expression that matches no parameter is
        a ValueError.

    Returns
    -------
    list of dict
        At most four groups with ``params``, ``weight_decay`` and ``adapt``, none empty, in an
        order that depends on the model alone.

    Examples
    --------
    >>> weights, biases = parameter_groups(model, weight_decay=1e-4)  # of a linear layer
    >>> weights["weight_decay"], biases["weight_decay"]
    (0.0001, 0.0)
    """
    owners = {
        id(param): module
        for module in model.modules()
        for param in module.parameters(recurse=False)
    }

    def neither(name: str, param: torch.Tensor) -> bool:
        return param.dim() <= 1 or isinstance(owners[id(param)], _NORMS)

    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    rules = [
        _rule(choice, what, neither, [name for name, _ in named])
        for choice, what in (
            (exclude_from_decay, "exclude_from_decay"),
            (exclude_from_adaptation, "exclude_from_adaptation"),
        )
    ]
    groups: dict[tuple[bool, bool], list[torch.Tensor]] = {}
    for name, param in named:
        key = (not rules[0](name, param), not rules[1](name, param))
        groups.setdefault(key, []).append(param)
    return [
        {"params": params, "weight_decay": weight_decay if decays else 0.0, "adapt": adapts}
        for (decays, adapts), params in sorted(groups.items(), key=lambda item: item[0])[::-1]
    ]


def _rule(
    choice: Choice,
    what: str,
    default: Callable[[str, torch.Tensor], bool],
    names: list[str],
) -> Callable[[str, torch.Tensor], bool]:
    if choice is None:
        return default
    if callable(choice):
        return choice
    if isinstance(choice, str):
        raise TypeError(f"{what}={choice!r} must be a list of expressions: [{choice!r}]")
    expressions = []
    for each in choice:
        try:
            expressions.append(re.compile(each))
        except re.error as error:
            raise ValueError(f"{what}: {each!r} is not a regular expression: {error}") from None
    for expression in expressions:
        if not any(expression.search(name) for name in names):
            raise ValueError(f"{what}: {expression.pattern!r} matches no parameter of the model")
    return lambda name, param: any(expression.search(name) for expression in expressions)


def zero_last_gammas(model: nn.Module, names: Iterable[str]) -> None:
    r"""Set the weights of these normalisation layers to zero: the last ones of residual blocks.

    Blocks then start as identities, which eases the first steps of large batches (Goyal et al.,
    section 5.1). Use it before `broadcast_parameters`.

    Parameters
    ----------
    model : nn.Module
        A module with normalisation layers.
    names : iterable of str
        Regular expressions that match whole names of layers, as ``r"layer\d\.\d\.bn3"`` for
        torchvision's ResNet-50. ValueError if one matches none, or a layer without a weight.

    Examples
    --------
    >>> block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    >>> zero_last_gammas(block, ["1"])
    """
    if isinstance(names, str):
        raise TypeError(f"names={names!r} must be a list of expressions: [{names!r}]")
    modules = dict(model.named_modules())
    for pattern in names:
        found = [module for name, module in modules.items() if re.fullmatch(pattern, name)]
        if not found:
            raise ValueError(f"zero_last_gammas: {pattern!r} matches no module")
        for module in found:
            if not isinstance(module, _NORMS) or getattr(module, "weight", None) is None:
                raise ValueError(
                    f"zero_last_gammas: {pattern!r} matches a {type(module).__name__}, which is no "
                    "normalisation layer with a weight"
                )
            nn.init.zeros_(module.weight)  # type: ignore[arg-type]
