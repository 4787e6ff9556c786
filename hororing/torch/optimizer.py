"""DistributedOptimizer: an optimizer whose gradients are reduced over all ranks.

The given optimizer itself becomes distributed: its class is replaced by a sub-class. It keeps its
state and options, other objects that refer to it (such as a learning rate scheduler) stay valid,
and it is still an instance of its class.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch.nn.parameter import is_lazy

from hororing._adapters.optimizer_options import (
    Reduction,
    checked_passes,
    checked_reduction,
    choose_groups,
)
from hororing._engine import membership
from hororing._engine.state import size
from hororing._requests.arguments import Adasum, Average
from hororing._requests.compression import Compressor, NoneCompressor, StatefulCompression
from hororing._requests.names import OPTIMIZER, default_name
from hororing._requests.process_sets import ProcessSet, global_process_set
from hororing.torch._optimizer import grad_scaler
from hororing.torch._optimizer.adasum import DeltaDistributed
from hororing.torch._optimizer.auto_groups import Measured, check_auto_groups
from hororing.torch._optimizer.distributed import Distributed, Settings, parameters
from hororing.torch._optimizer.grouping import Grouping
from hororing.torch.compression.auto import Auto, Chosen, note_loss
from hororing.torch.compression.grouping import Compressed, check_compressed
from hororing.torch.guard import guard_optimizer

grad_scaler.teach()


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] | StatefulCompression = NoneCompressor,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | str | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:  # a class made at run time, with `synchronize` and other methods
    """Make `optimizer` reduce its gradients over all ranks, and return it.

    Gradients are sent while backward still runs, and are reduced when `backward()` returns, which
    waits for the other ranks. On a rank without a backward pass, `step()` does. Errors of the
    reduction (MismatchError, PeerLostError, ...) are raised there. Parameters that are unfrozen or
    added later are reduced, too. A job of one rank reduces nothing.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any torch optimizer. It becomes a distributed one itself.
    named_parameters : iterable of (str, torch.Tensor), optional
        ``model.named_parameters()``: the names of all parameters of the optimizer, for messages
        and the timeline. Without it, names are made from positions, and all ranks must create
        their optimizers in the same order.
    compression : Compressor, optional
        How gradients are sent: Compression.none, .fp16, .bf16 or your own Compressor; or
        Compression.int8, .powersgd, .topk or .auto, which send the rest in later steps
        (docs/compression.md); with op=Average or Sum.
    backward_passes_per_step : int, optional
        The number of backward passes, of which the last one reduces. Gradients add up over
        passes and are averaged over ranks.
    op : ReduceOp, optional
        Average, Sum, Min, Max or Product; or Adasum, see below. Another backward pass before
        `step()` or `zero_grad()` averages again with Average; with another operation it is an
        AssertionError.
    gradient_predivide_factor : float, optional
        With op=Average, divide by this before the sum and multiply by it after: against
        overflow of 16-bit floats.
    num_groups : int, optional
        Deprecated; use `groups`.
    groups : int or str or sequence of sequence of torch.Tensor, optional
        A number of groups, or lists of parameters. A group is reduced in one message when all
        its gradients are ready. Parameters in no list are reduced one by one. "auto": the
        groups whose reductions finish earliest, found from measurements of the first steps; see
        docs/scheduling.md.
    sparse_as_dense : bool, optional
        Reduce sparse gradients as dense ones. Needed if a rank may lack a gradient that it has
        never had: it cannot know that it is sparse (MismatchError).
    process_set : ProcessSet, optional
        The ranks that reduce with each other. Ranks outside it step alone.

    Notes
    -----
    With op=Adasum each rank takes its own step with its own gradients, in `step()`, and the
    changes of the parameters, not the gradients, are combined (Maleki et al. 2020,
    arXiv:2006.02924). Clip and unscale gradients before `step()`, without `synchronize()` and
    `skip_synchronize()`. Optimizer state differs between ranks. All ranks take part, and their
    number must be a power of two. `compression` and `groups` apply to the changes, which are
    dense even if gradients are sparse.

    Examples
    --------
    >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, Distributed):
        raise ValueError("optimizer is distributed already; wrap it once")
    what = "DistributedOptimizer"
    checked_passes(backward_passes_per_step)
    method = compression if isinstance(compression, StatefulCompression) else None
    options = checked_reduction(
        what, op=op, gradient_predivide_factor=gradient_predivide_factor,
        compression=NoneCompressor if method is not None else cast(type[Compressor], compression),
        sparse_as_dense=sparse_as_dense, process_set=process_set,
    )  # fmt: skip
    groups = choose_groups(what, num_groups, groups)
    mixin: type[Distributed] = Distributed
    grouping: type[Grouping] = Grouping
    namespace: dict[str, Any] = {}
    if method is not None:
        check_compressed(options, groups)
        grouping = Compressed
        if isinstance(method, Auto):
            grouping, namespace = Chosen, {"note_loss": note_loss}
    elif options.op == Adasum and (size() > 1 or membership.is_elastic()):
        mixin = DeltaDistributed
    if isinstance(groups, str):
        check_auto_groups(groups, options.op)
        grouping, groups = Measured, None
    return become(
        optimizer, mixin, options, named_parameters, backward_passes_per_step, groups, grouping,
        method, **namespace,
    )  # fmt: skip


def become(
    optimizer: torch.optim.Optimizer,
    mixin: type[Distributed],
    options: Reduction,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    passes: int,
    groups: int | Sequence[Sequence[torch.Tensor]] | None,
    grouping: type[Grouping] = Grouping,
    method: StatefulCompression | None = None,
    **namespace: Any,
) -> torch.optim.Optimizer:
    """Give `optimizer` a class that derives from `mixin` and its old class. `namespace` is that of
    the new class, `method` that of `grouping`. Checks only names and groups.
    """
    params = parameters(optimizer)
    named = checked_names(named_parameters, params)
    positions = _positions(groups, params)
    members = options.process_set.process_set_id  # each set counts its optimizers
    assert members is not None
    # The first optimizer's names are those that Horovod uses for all.
    count = default_name(OPTIMIZER, members).rpartition(".")[2]
    prefix = "allreduce.noname" if count == "1" else f"allreduce.noname.{count}"
    if named is None:
        names = [
            f"{prefix}.{number}.{index}"
            for number, group in enumerate(optimizer.param_groups)
            for index, _ in enumerate(group["params"])
        ]
    else:
        name_of = {id(param): name for name, param in named}
        names = [name_of[id(param)] for param in params]
        if first := next(iter([*names, *name_of.values()]), ""):  # groups may come later
            prefix = f"optimizer.{first}"  # the same on every rank, whatever else a rank created
    base = type(optimizer)
    namespace = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "_settings": Settings(options, prefix, tuple(names), positions, grouping, method),
        "_passes_of_copies": passes,
        **namespace,
    }
    # They may be called inside a function that torch.compile traces.
    untraced: Any = torch.compiler.disable  # torch declares no type
    for name in ("step", "synchronize", "zero_grad"):
        namespace[name] = untraced(getattr(mixin, name))
    # GradScaler passes itself if it finds a parameter of that name.
    namespace["step"].__signature__ = inspect.signature(base.step)
    if hasattr(optimizer.__dict__.get("step"), "_wrapped_by_lr_sched"):
        # A scheduler wrapped the step of this instance, to detect calls. Our step has the same
        # mark, and the old wrapper must not hide ours.
        del optimizer.__dict__["step"]
        namespace["step"]._wrapped_by_lr_sched = True
    distributed: Any = type(base.__name__, (mixin, base), namespace)
    optimizer.__class__ = distributed
    optimizer._become_distributed(passes, named or [])  # type: ignore[attr-defined]
    guard_optimizer(optimizer)
    return optimizer


def checked_names(
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None, params: list[torch.Tensor]
) -> list[tuple[str, torch.Tensor]] | None:
    """Return the pairs, if they name all of `params` once; ValueError otherwise."""
    lazy = [position for position, param in enumerate(params) if is_lazy(param)]
    if lazy:
        raise ValueError(
            f"parameters {lazy[:8]} have no shape yet, because lazy modules get one from their "
            "first batch; run the model on a batch, on all ranks, before the optimizer is made"
        )
    if named_parameters is None:
        return None
    named = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in named):
        raise ValueError(
            "named_parameters must be (name, parameter) pairs, usually model.named_parameters()"
        )
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1}) if (
        len(set(names)) != len(names)
    ) else []  # fmt: skip
    if twice:
        raise ValueError(
            f"named_parameters holds {', '.join(map(repr, twice))} more than once; names must be "
            "unique, also over several models"
        )
    held = {id(param) for _, param in named}
    unnamed = [position for position, param in enumerate(params) if id(param) not in held]
    if unnamed:
        raise ValueError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's {len(params)} parameters, "
            f"by position {unnamed[:8]}; name all of them, or leave named_parameters out"
        )
    return named


def _positions(
    groups: int | Sequence[Sequence[torch.Tensor]] | None, params: list[torch.Tensor]
) -> tuple[tuple[int, ...], ...]:
    """Return `groups` as positions among `params`."""
    if groups is None:
        return ()
    if isinstance(groups, int):
        if groups <= 0:
            raise ValueError(f"groups={groups} must be a positive number or lists of parameters")
        live = [position for position, param in enumerate(params) if param.requires_grad]
        count = min(groups, len(live))
        bounds = [index * len(live) // count for index in range(count)] + [len(live)]
        return tuple(tuple(live[begin:end]) for begin, end in itertools.pairwise(bounds))
    if not isinstance(groups, Iterable):
        raise ValueError(f"groups={groups!r} must be a positive number or lists of parameters")
    position_of = {id(param): position for position, param in enumerate(params)}
    result, seen = [], set()
    for number, group in enumerate(groups):
        if not isinstance(group, list | tuple) or not group:
            raise ValueError("groups must be a number or non-empty lists of parameters")
        for param in group:
            if not isinstance(param, torch.Tensor):
                raise ValueError(
                    f"groups must consist of parameters; group {number} holds a "
                    f"{type(param).__name__}"
                )
            if id(param) not in position_of:
                raise ValueError(f"group {number} holds a parameter the optimizer does not have")
            if id(param) in seen:
                raise ValueError(f"a parameter of group {number} occurs in groups twice")
            seen.add(id(param))
        result.append(tuple(position_of[id(param)] for param in group))
    return tuple(result)
