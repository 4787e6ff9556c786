"""The momenta of an optimizer: what ranks may keep, average or reset when they average weights.

A rank whose parameter has not had a gradient yet lacks its state. It takes part in the average
with zeros, and keeps none.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import torch

from hororing.extension import ProcessSet
from hororing.numpy import allgather_object
from hororing.torch.ops import allgather

# Keys of torch's optimizers under which zeros mean a fresh start.
KNOWN = frozenset({
    "acc_delta", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq",
    "momentum_buffer", "square_avg",
})  # fmt: skip

# Names of master copies in hororing's LARS and LAMB, and in other optimizers.
MASTERS = frozenset({"float32_weight", "master", "master_param", "master_weight"})

Spec = tuple[int, str, str]  # position of the parameter, key, dtype


def held(
    optimizer: torch.optim.Optimizer, params: Iterable[torch.Tensor], keys: frozenset[str]
) -> Iterator[tuple[Spec, torch.Tensor]]:
    """Yield the momenta that this rank has.

    ValueError for state of a parameter's shape that is not known to be one.
    """
    for position, param in enumerate(params):
        for key, value in sorted(optimizer.state.get(param, {}).items()):
            if (
                key == "step"
                or is_master(key)
                or not isinstance(value, torch.Tensor)
                or not value.is_floating_point()
                or value.shape != param.shape
            ):
                continue
            if key not in keys:
                raise ValueError(
                    f"HierarchicalSGD: is state '{key}' of {type(optimizer).__name__} a momentum? "
                    f"Pass momentum_keys=[{key!r}, ...] with all momenta, or momentum='keep'"
                )
            yield (position, key, str(value.dtype)), value


def is_master(key: str) -> bool:
    """Whether the state is a master copy: the weights, with more digits."""
    return key in MASTERS


def to_average(
    momenta: dict[Spec, torch.Tensor],
    params: list[torch.Tensor],
    members: ProcessSet,
    name: str,
) -> list[torch.Tensor]:
    """Return `momenta`, in the same order on all `members`; zeros for those of other ranks."""
    mine = list(momenta)
    if len(members.ranks) == 1:
        return list(momenta.values())
    digest = torch.tensor([zlib.crc32(repr(mine).encode())], device="cpu")
    digests = allgather(digest, f"{name}.which", process_set=members)
    if bool((digests == digests[0]).all()):
        return list(momenta.values())
    specs = {spec for each in allgather_object(mine, f"{name}.who", members) for spec in each}
    return [
        momenta[spec]
        if spec in momenta
        else torch.zeros_like(params[spec[0]], dtype=getattr(torch, spec[2].split(".")[1]))
        for spec in sorted(specs)
    ]


def reset(
    optimizer: torch.optim.Optimizer, params: list[torch.Tensor], keys: frozenset[str]
) -> None:
    """Set momenta to zero, and with them the step that bias correction counts from."""
    for _, value in held(optimizer, params, keys):
        value.zero_()
    for param in params:
        state = optimizer.state.get(param, {})
        step = state.get("step")
        if isinstance(step, torch.Tensor):
            step.zero_()
        elif step is not None:
            state["step"] = 0
        if "mu_product" in state:  # NAdam's, of all steps so far
            state["mu_product"].fill_(1)
