"""HierarchicalSGD: an optimizer whose ranks average their weights periodically, in levels.

Like `hororing.torch.DistributedOptimizer`, it changes the given optimizer itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hororing.extension import (
    Compressor,
    NoneCompressor,
    Reduction,
    check_reduction,
    checked_passes,
    global_process_set,
    is_elastic,
)
from hororing.numpy import Average, rank, size
from hororing.toolkit.large_batch.outer import Outer
from hororing.toolkit.large_batch.plan import WHAT, Request, make_plan
from hororing.toolkit.torch.optim import momenta
from hororing.toolkit.torch.optim.averages import averageable
from hororing.toolkit.torch.optim.hierarchical import Hierarchical
from hororing.torch.extension import Distributed, become, checked_names, parameters


def HierarchicalSGD(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    period_group_size_dict: Mapping[int, Any],
    warmup_steps: int = 0,
    named_buffers: Iterable[tuple[str, torch.Tensor]] = (),
    gradient_groups: int | str | Sequence[Sequence[int]] | None = "host",
    momentum: str = "keep",
    momentum_keys: Iterable[str] | None = None,
    outer: Outer | None = None,
    weight: float | None = None,
    delay_steps: int = 0,
    overlap_backward: bool = False,
    late_parameters: Iterable[torch.Tensor] = (),
    compression: type[Compressor] = NoneCompressor,
    backward_passes_per_step: int = 1,
) -> Any:  # a class made at run time, as by DistributedOptimizer
    """Make `optimizer` one of hierarchical SGD, and return it. Collective, with equal arguments.

    The first `warmup_steps` are those of `DistributedOptimizer`. Then every rank takes its own
    steps, with gradients that are averaged only within its gradient group. Weights are averaged
    periodically within groups of ranks, less often within larger groups. A late rank therefore
    delays its group at once, and the others at the next average of all. Local SGD is
    ``{8: "world"}`` with ``gradient_groups=None``; post-local SGD is the same with `warmup_steps`.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any torch optimizer except LBFGS. It becomes a hierarchical SGD optimizer itself.
    named_parameters : iterable of (str, torch.Tensor), optional
        As for `DistributedOptimizer`.
    period_group_size_dict : dict
        From periods, ascending, each a multiple of the one before, to groups: a number of
        consecutive ranks, "host", "world", or lists of ranks. Groups nest; the last is all
        ranks. ``OrderedDict([(2, 4), (8, 16)])``: groups of 4 every 2 steps, all 16 every 8th.
        hororing/toolkit/large_batch/hierarchy.py defines when a level is due.
    warmup_steps : int, optional
        Number of synchronous steps at the start.
    named_buffers : iterable of (str, torch.Tensor), optional
        ``model.named_buffers()``: those of floating point (batch-norm statistics) are averaged
        with the weights. Nothing is sent in the forward pass. Leave out buffers that must not
        be averaged.
    gradient_groups : int or str or sequence of sequence of int, optional
        Groups, as above, whose gradients are averaged in each step after the warm-up; None:
        each rank uses its own (torch: post_local_gradient_allreduce=False).
    momentum : str, optional
        "keep": each rank its own; "average": with the weights; "reset": to zero, and the steps
        of bias correction as well, when weights are averaged.
    momentum_keys : iterable of str, optional
        Which tensors in the optimizer's state are momenta, if it is not one of torch's.
    outer : Outer, optional
        SlowMo or OuterSGD of hororing.toolkit.large_batch.outer, which is applied to averages
        of the last level. Keeps two copies of the weights. All ranks must start with the same
        weights.
    weight : float, optional
        The weight of this rank in averages, for example its number of samples; None on all
        ranks: equal weights.
    delay_steps : int, optional
        Averages run while training continues, and their correction, mean - snapshot, is added
        after this number of steps; at most the shortest period. Needs a copy of the weights;
        excludes momentum="average".
    overlap_backward : bool, optional
        When an average is due, update and average weights while backward still runs: for
        optimizers that update each parameter by itself. Needs gradient_groups=None; excludes
        clipping, GradScaler, closures, delay_steps, and momentum="average".
    late_parameters : iterable of torch.Tensor, optional
        Those that are not updated inside backward: used by an operation that runs its backward
        after their gradient is complete.
    compression, backward_passes_per_step : Compressor or int, optional
        As for `DistributedOptimizer`; compression is for gradients.

    Returns
    -------
    object
        The optimizer, with `final_average()`, to be called by all ranks before evaluation and
        checkpoints; `regroup()`; `steps_done`; `last_average`. `state_dict()` has the counter.

    Raises
    ------
    ValueError, TypeError : on every rank, if an argument of one rank is invalid; the text names the
        level. Also if ranks differ.

    Notes
    -----
    After the warm-up, ranks hold different weights. Averages cover all parameters of the optimizer,
    with or without gradient. With `torch.amp.GradScaler`, all ranks agree in every step whether to
    skip it, and therefore wait for the last one: use bfloat16.

    In an elastic job this call does not communicate. Put the optimizer into a `TorchState`: before
    `hvd.elastic.run` calls the training function, it forms groups of the current ranks, by the same
    rules, and all ranks get the weights of rank 0. If the rules do not fit these ranks, `run`
    raises a ValueError on every rank; "host" and "world" always fit.

    Examples
    --------
    >>> optimizer = HierarchicalSGD(
    ...     torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
    ...     period_group_size_dict={2: "host", 8: "world"}, warmup_steps=100,
    ...     named_buffers=model.named_buffers(),
    ... )
    """
    request = Request(
        period_group_size_dict, warmup_steps, gradient_groups, momentum, outer, weight,
        delay_steps, overlap_backward,
    )  # fmt: skip
    buffers = [(name, each) for name, each in named_buffers if averageable(each)]
    named = None if named_parameters is None else list(named_parameters)

    def check() -> dict[str, Any]:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch Optimizer, not {type(optimizer).__name__}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError("LBFGS evaluates the loss several times per step; use another one")
        if isinstance(optimizer, Distributed):
            raise ValueError("optimizer is distributed already; wrap it once")
        if overlap_backward and getattr(optimizer, "_max_norm", None) is not None:
            raise ValueError(
                "overlap_backward cannot be used with max_norm, because clipping needs all "
                "gradients at once; leave out one of them"
            )
        checked_names(named, parameters(optimizer))
        checked_passes(backward_passes_per_step)
        check_reduction(WHAT, Average, 1.0, compression, global_process_set)
        shapes = [tuple(param.shape) for param in parameters(optimizer)]
        return {"buffers": [name for name, _ in buffers], "shapes of parameters": shapes}

    if is_elastic():  # later ranks create it while others train
        plan = None
        check()
    else:
        plan = make_plan(request, check)
    if plan is not None and rank() == 0 and size() > 1 and len(plan.gradient_groups) == 1:
        warnings.warn(
            f"{WHAT}: gradient_groups={gradient_groups!r} is one group of all {size()} ranks, so "
            "training stays synchronous after the warm-up; pass smaller groups, or None",
            stacklevel=2,
        )
    options = Reduction(compression=compression)
    return become(
        optimizer, Hierarchical, options, named, backward_passes_per_step, None,
        _request=request, _plan=plan, _buffers=[buffer for _, buffer in buffers],
        _variances=tuple(name.endswith(("var", "variance")) for name, _ in buffers),
        _late=tuple(late_parameters),
        _momentum_keys=momenta.KNOWN if momentum_keys is None else frozenset(momentum_keys),
    )  # fmt: skip
