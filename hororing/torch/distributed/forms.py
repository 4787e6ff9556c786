"""torch's short forms of calls: a tensor, a root or an operation instead of lists and options."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as torch_distributed

# torch's stubs lack many names.
dist: Any = torch_distributed
AllgatherOptions: Final[Any] = dist.distributed_c10d.AllgatherOptions

# For each verb: its options, how many arguments are tensors, and the fields that follow.
_FORMS: Final[dict[str, tuple[Any, int, tuple[str, ...]]]] = {
    "allreduce": (dist.AllreduceOptions, 1, ("reduceOp", "timeout")),
    "broadcast": (dist.BroadcastOptions, 1, ("rootRank", "timeout")),
    "reduce": (dist.ReduceOptions, 1, ("rootRank", "reduceOp", "timeout")),
    "allgather": (AllgatherOptions, 2, ("timeout",)),
    "gather": (dist.GatherOptions, 2, ("rootRank", "timeout")),
    "scatter": (dist.ScatterOptions, 2, ("rootRank", "timeout")),
    "reduce_scatter": (dist.ReduceScatterOptions, 2, ("reduceOp", "timeout")),
    "barrier": (dist.BarrierOptions, 0, ("timeout",)),
}
_KEYWORDS: Final = {"root": "rootRank", "op": "reduceOp"}


def long_form(verb: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments as lists of tensors, and options; those of other verbs as they are.

    TypeError for too many arguments.
    """
    form = _FORMS.get(verb)
    if form is None:
        return args
    options, count, fields = form
    if len(args) > count and isinstance(args[count], options):  # almost always
        return args
    tensors, rest = args[:count], args[count:]
    if count > 1 and any(isinstance(each, torch.Tensor) for each in tensors):
        tensors = tuple([each] for each in tensors)
    if len(rest) > len(fields):
        raise TypeError(f"{verb}: there are {len(args)} arguments, at most {count + len(fields)}")
    opts = keywords.pop("opts", None) or options()
    given = dict(zip(fields, rest, strict=False))
    given.update((_KEYWORDS.get(key, key), keywords.pop(key)) for key in list(keywords))
    for field, value in given.items():
        if value is not None:
            setattr(opts, field, value)
    return (*tensors, opts)
