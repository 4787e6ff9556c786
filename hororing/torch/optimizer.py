"""DistributedOptimizer: an optimizer whose gradients are reduced over all ranks.

The given optimizer itself becomes distributed: its class is replaced by a sub-class of it, made
for the purpose. So it keeps its state, its options and whatever refers to it (a learning rate
scheduler, say), and is still an instance of its class.

`torch.amp.GradScaler` looks at gradients before it calls `step()`. Its `unscale_` and `step` are
wrapped here, once for the process, so that they wait for the gradients of distributed
optimizers first; then all ranks see the same infinities and skip the same steps.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hororing import collectives
from hororing.collectives import Average
from hororing.compression import Compressor, NoneCompressor, check_compression
from hororing.runtime import size
from hororing.torch.gradient import Options
from hororing.torch.reducer import Reducer
from hororing.torch.verbs import verbs


class _Settings(NamedTuple):
    """What a copy of the optimizer needs to become distributed like it. Positions count all
    parameters in the order of the groups.
    """

    options: Options
    prefix: str
    names: tuple[str, ...]  # by position
    groups: tuple[tuple[int, ...], ...]  # positions


class _Distributed(torch.optim.Optimizer):
    """What distributed optimizers add to their class."""

    _settings: _Settings  # of the class, which serves one optimizer and its copies
    _reducer: Reducer | None  # None in a job of one rank
    backward_passes_per_step: int
    _parameter_names: dict[torch.Tensor, str]

    def _become_distributed(self, passes: int, extra: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Start to reduce gradients; `extra` names parameters that may be added later."""
        settings = self._settings
        params = _parameters(self)
        # Parameters of later groups have no names there.
        named = list(zip(settings.names, params, strict=False))
        self.backward_passes_per_step = passes
        self._parameter_names = {param: name for name, param in named}
        self._should_synchronize = True
        self._synchronized_by_user = False
        self._reducer = None
        if size() > 1:
            self._reducer = Reducer(
                settings.options,
                passes,
                self.param_groups,
                [*extra, *named],
                settings.prefix,
                [[params[position] for position in group] for group in settings.groups],
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # copy.deepcopy comes here with new parameters, load_state_dict with those we know.
        if "_reducer" not in self.__dict__:
            self._become_distributed(type(self)._passes_of_copies, [])

    _passes_of_copies = 1

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; use it before clipping them.

        Parameters that have no gradient on this rank get a zero one and are reduced as well.
        """
        self._reduce()
        self._synchronized_by_user = True

    def _reduce(self) -> None:
        if self._reducer is not None and not self._reducer.synchronized:
            self._synchronized_by_user = False
            self._reducer.synchronize(self.param_groups)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step()` inside the context not wait for gradients: `synchronize()` has done so."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Wait until all gradients are reduced, then take the wrapped optimizer's step.

        Gradients that `closure` computes are reduced each time it is called, and its loss is
        reduced like them, so that all ranks decide alike.
        """
        self._opt_called = True  # learning rate schedulers look at it
        if closure is not None:
            return self._step_with_closure(closure, **kwargs)
        if self._should_synchronize:
            if self._reducer is not None and self._synchronized_by_user:
                warnings.warn(
                    "optimizer.step() was called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(); gradients are not reduced a second time. Write "
                    "`with optimizer.skip_synchronize(): optimizer.step()`",
                    stacklevel=2,
                )
            self._reduce()
        else:
            self._check_nothing_in_flight("step() inside skip_synchronize()")
        self._start_over()
        return super().step(**kwargs)

    def _step_with_closure(self, closure: Callable[[], Any], **kwargs: Any) -> Any:
        reducer = self._reducer
        if reducer is None:
            return super().step(closure, **kwargs)
        # Ranks may differ in whether they have gradients, and must agree on when to reduce them.
        if self._on_any_rank("in_flight", bool(reducer.in_flight)):
            reducer.synchronize(self.param_groups)

        def reduced() -> Any:
            loss = closure()
            if self._on_any_rank("new", not reducer.synchronized):
                reducer.synchronize(self.param_groups)
            return self._reduced_loss(loss)

        result = super().step(reduced, **kwargs)
        self._start_over()
        return result

    def _on_any_rank(self, what: str, here: bool) -> bool:
        name = f"{self._settings.names[0]}.closure_{what}"
        return bool(verbs.allreduce(torch.tensor(here), name=name, op=collectives.Max))

    def _reduced_loss(self, loss: Any) -> Any:
        name, op = f"{self._settings.names[0]}.closure_loss", self._settings.options.op
        if isinstance(loss, float | int):
            return verbs.allreduce(torch.tensor(loss, dtype=torch.float64), name=name, op=op).item()
        if isinstance(loss, torch.Tensor):
            return verbs.allreduce(loss.detach(), name=name, op=op)
        return loss  # None, or something that only the caller understands

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients; AssertionError while some are being reduced."""
        self._check_nothing_in_flight("zero_grad() after backward()")
        self._start_over()
        super().zero_grad(set_to_none)

    def _check_nothing_in_flight(self, what: str) -> None:
        in_flight = self._reducer.in_flight if self._reducer is not None else []
        if in_flight:
            raise AssertionError(
                f"optimizer: {what} while {len(in_flight)} gradients, '{in_flight[0]}' the first, "
                "are being reduced, which would be a race; call optimizer.step() or "
                "optimizer.synchronize() before"
            )

    def _start_over(self) -> None:
        self._synchronized_by_user = False
        if self._reducer is not None:
            self._reducer.restart()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce gradients after every `passes` backward passes from now on."""
        self.backward_passes_per_step = _checked_passes(passes)
        type(self)._passes_of_copies = passes
        if self._reducer is not None:
            self._reducer.restart(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; their gradients are reduced from now on."""
        super().add_param_group(param_group)
        if self._reducer is not None:
            self._reducer.follow(self.param_groups)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Forget gradients in flight, then load."""
        if self._reducer is not None:
            self._reducer.abandon()
        self._start_over()
        super().load_state_dict(*args, **kwargs)


# torch wraps the `step` of every class to call its hooks. Ours calls a wrapped one.
_Distributed.step.hooked = True  # type: ignore[attr-defined]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = NoneCompressor,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
) -> torch.optim.Optimizer:
    """Make `optimizer` reduce its gradients over all ranks, and return it.

    Gradients are sent while backward still runs; `step()` waits for them. Each is reduced once
    between two steps. Parameters that are unfrozen or added later are reduced, too; in a job of
    one rank nothing is.

    Parameters
    ----------
    optimizer : any torch optimizer. It becomes a distributed one itself.
    named_parameters : ``model.named_parameters()``; names for messages and the timeline, for
        every parameter of the optimizer. Without it names are made from positions; then all
        ranks must create their optimizers in the same order.
    compression : how gradients travel: Compression.none, .fp16, .bf16 or your own Compressor.
    backward_passes_per_step : gradients are sent after this many backward passes. They add up
        over passes and are averaged over ranks.
    op : Average, Sum, Min, Max or Product.
    gradient_predivide_factor : with op=Average, divide by this before the sum and multiply by
        it after: against overflow of 16-bit floats.
    num_groups : deprecated; use `groups`.
    groups : a number of groups, or lists of parameters; a group is reduced in one go when all
        its gradients are there. Parameters in no list are reduced one by one.
    sparse_as_dense : reduce sparse gradients as dense ones. Needed where a rank may lack one
        before it has had any, for then it cannot know that it is sparse (MismatchError).

    Examples
    --------
    >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, _Distributed):
        raise ValueError("optimizer is distributed already; wrap it once")
    collectives.check_op(op)
    check_compression(compression)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor is for op=Average only; leave it out")
    if not gradient_predivide_factor > 0:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} must be positive")
    _checked_passes(backward_passes_per_step)
    if num_groups != 0:
        warnings.warn(
            "parameter `num_groups` is deprecated; use `groups`", DeprecationWarning, stacklevel=2
        )
        if groups is not None:
            raise ValueError("num_groups and groups exclude each other; use groups")
        groups = num_groups
    size()  # raises before `init`

    params = _parameters(optimizer)
    positions = _positions(groups, params)
    named = _checked_names(named_parameters, params)
    prefix = collectives.default_name("optimizer")
    if named is None:
        names = [
            f"{prefix}.{number}.{index}"
            for number, group in enumerate(optimizer.param_groups)
            for index, _ in enumerate(group["params"])
        ]
    else:
        name_of = {id(param): name for name, param in named}
        names = [name_of[id(param)] for param in params]
        prefix = f"optimizer.{names[0]}"  # the same on every rank, whatever else a rank created
    base = type(optimizer)
    options = Options(compression, op, gradient_predivide_factor, sparse_as_dense)
    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "_settings": _Settings(options, prefix, tuple(names), positions),
        "_passes_of_copies": backward_passes_per_step,
    }
    if hasattr(optimizer.__dict__.get("step"), "_wrapped_by_lr_sched"):
        # A scheduler wrapped the step of this instance, to see whether it is called. Ours tells
        # it so as well, and must not be hidden by the old one.
        del optimizer.__dict__["step"]
        namespace["step"] = functools.wraps(_Distributed.step)(
            lambda self, *args, **kwargs: _Distributed.step(self, *args, **kwargs)
        )
        namespace["step"]._wrapped_by_lr_sched = True
    distributed: Any = type(base.__name__, (_Distributed, base), namespace)
    optimizer.__class__ = distributed
    optimizer._become_distributed(backward_passes_per_step, named or [])  # type: ignore[attr-defined]
    return optimizer


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _checked_passes(passes: int) -> int:
    if passes < 1:
        raise ValueError(f"backward_passes_per_step={passes} must be at least 1")
    return passes


def _checked_names(
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None, params: list[torch.Tensor]
) -> list[tuple[str, torch.Tensor]] | None:
    if named_parameters is None:
        return None
    named = list(named_parameters)
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


def _teach_grad_scaler() -> None:
    """Wrap the two methods of GradScaler that look at gradients."""
    scaler = torch.amp.GradScaler
    unscale, step = scaler.unscale_, scaler.step

    def reduce_first(self: Any, optimizer: Any) -> None:
        if isinstance(optimizer, _Distributed) and self.is_enabled():
            optimizer._reduce()

    @functools.wraps(unscale)
    def unscale_(self: Any, optimizer: Any) -> None:
        reduce_first(self, optimizer)
        unscale(self, optimizer)

    @functools.wraps(step)
    def scaled_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        reduce_first(self, optimizer)
        result = step(self, optimizer, *args, **kwargs)
        if isinstance(optimizer, _Distributed) and self.is_enabled():
            optimizer._start_over()  # also when the step was skipped
        return result

    scaler.unscale_ = unscale_  # type: ignore[method-assign]
    scaler.step = scaled_step  # type: ignore[method-assign]


_teach_grad_scaler()
