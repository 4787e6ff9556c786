"""Guard: notices, while a model trains, that ranks no longer have the same one. See docs/guard.md.

The half of `hororing.guard` that knows torch. A guard hears of steps in one of three ways:

    an optimizer of ours            its reductions; the digests are part of the next one
    DistributedDataParallel         its backward passes that reduce; the rest at the next step
    any other optimizer             its steps, which all ranks must take
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hororing._requests.process_sets import ProcessSet, global_process_set
from hororing.guard import Finding, Options, Watch, sums
from hororing.guard.options import checked, from_environment
from hororing.torch._optimizer.distributed import Distributed
from hororing.torch._optimizer.step import queue_callback
from hororing.torch.finite import Finite
from hororing.torch.guarded_tensors import Tensors
from hororing.torch.snapshot import Snapshot

_guards: weakref.WeakKeyDictionary[torch.optim.Optimizer, Guard] = weakref.WeakKeyDictionary()


class Guard:
    """Compares the replicas of all ranks while they train, and names what differs.

    After the first step and after every `every` steps, ranks compare one number: a digest of the
    bits of all parameters, buffers and tensors of the optimizer, of its settings, and of the number
    of steps taken. It travels with the gradients of the next step. Only if it differs do ranks find
    out which tensor differs, on which rank, and by how much. Not compared, and listed in
    `report()`: running statistics of batch norm, buffers that are not in the `state_dict`, and
    sharded tensors (FSDP, ZeRO).

    With `hvd.DistributedOptimizer`, errors are raised on all ranks, by `backward()`; with
    `DistributedDataParallel` over our backend and with other optimizers, by `optimizer.step()`. All
    ranks must make the guard, before the first step, with the same arguments; it lives as long as
    the optimizer.

    Parameters
    ----------
    model : torch.nn.Module
        Also a `DistributedDataParallel`. None: only what the optimizer has.
    optimizer : torch.optim.Optimizer
        What `hvd.DistributedOptimizer` has returned; or any optimizer, whose `step` all ranks call
        equally often.
    every : int
        The number of steps from one comparison to the next; 0: none.
    on_divergence : str or function
        "error": MismatchError on all ranks. "warn": a warning in the log, again when other tensors
        differ. "repair": all ranks get the values that more than half of them have; MismatchError
        if there are none. A function: it is called on all ranks with a `Finding`.
    ignore : iterable of str
        Patterns of names that are not compared, such as ``"*.running_*"`` (`fnmatch`).
    on_nonfinite : str or None
        What happens when a gradient of some rank is infinite or NaN, before it is reduced. "warn":
        a warning in the log names it. "error": FloatingPointError on all ranks. "skip": the step
        changes nothing, on all ranks (other optimizers than ours get no gradients). None: nobody
        looks. With `torch.amp.GradScaler`, which skips such steps itself, only at scales of 1 or
        less. Of sharded parameters (FSDP), the shards of gradients are looked at, once they are
        summed.
    max_skips : int
        FloatingPointError on all ranks after so many skipped steps in a row.
    snapshot : path or None
        A folder. A rank that something was found on writes the model, the random states and what
        the script has passed to `batch`, at most three times: see `hororing.torch.snapshot`.

    Raises
    ------
    ValueError : an argument is wrong, or the optimizer has a guard already.

    Examples
    --------
    >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    >>> guard = hvd.Guard(model, optimizer, every=100)
    """

    _by_environment: bool

    def __init__(
        self,
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer,
        every: int = 100,
        on_divergence: str | Callable[[Finding], object] = "error",
        ignore: Iterable[str] = (),
        on_nonfinite: str | None = "warn",
        max_skips: int = 10,
        snapshot: str | os.PathLike[str] | None = None,
    ) -> None:
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(f"Guard: model must be a Module, not {type(model).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"Guard: optimizer must be one of torch, not {type(optimizer).__name__}"
            )
        options = checked(
            "Guard",
            every=every,
            on_divergence=on_divergence,
            ignore=ignore,
            on_nonfinite=on_nonfinite,
            max_skips=max_skips,
        )
        self._begin(model, optimizer, options, by_environment=False)
        if snapshot is not None:
            self._source.snapshot = Snapshot(snapshot, self._source.model)

    def _begin(
        self,
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer,
        options: Options,
        *,
        by_environment: bool,
    ) -> None:
        earlier = _guards.get(optimizer)
        if earlier is not None and not earlier._by_environment:
            raise ValueError("Guard: this optimizer has a guard already")
        if earlier is not None:
            earlier.close()
        self._by_environment = by_environment
        self._handles: list[Any] = []
        source = self._source = Tensors(model, optimizer)
        named = min(source.names().values(), default="")
        process_set = _process_set(model, optimizer)
        self._watch = Watch(named, source, options, process_set)
        if options.on_nonfinite is not None:
            source.finite = Finite(self._watch.note, source.shown)
            self._watch.look = source.finite.look
            source.begin()
            self._unwatch = weakref.finalize(optimizer, sums.watch, False)
            sums.watch(True)
        self._attach(model, optimizer)
        _guards[optimizer] = self

    def _attach(self, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer) -> None:
        """Hear of steps."""
        watch, source = self._watch, self._source

        def stepped(*_: Any) -> None:
            source.steps += 1

        self._handles.append(optimizer.register_step_post_hook(stepped))
        if isinstance(optimizer, Distributed):
            optimizer.watch = None if optimizer._ranks_differ else watch
            return
        if isinstance(model, DistributedDataParallel):
            self._handles.append(optimizer.register_step_pre_hook(self._receive))
            _Passes.of(model).watches.append(watch)
            return
        count = 0

        def before(*step: Any) -> None:
            watch.enter(count)
            source.look_at_shards()
            watch.send_flags()
            self._receive(*step)

        def after(*_: Any) -> None:
            nonlocal count
            count += 1
            watch.send_digests(count)

        self._handles.append(optimizer.register_step_pre_hook(before))

        self._handles.append(optimizer.register_step_post_hook(after))

    def _receive(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Before a step of an optimizer that is not ours: see what ranks have found, and skip it.

        Optimizers of torch leave a parameter without a gradient, and its state, as it is.
        """
        self._watch.receive()
        if not self._watch.take_skip():
            return
        if any(map(callable, (*args[1:], *kwargs.values()))):
            raise FloatingPointError("Guard: it cannot skip a part of step(closure)")
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = None

    def batch(self, index: int, *inputs: Any) -> None:
        """Note the batch that the next step computes with, for a snapshot. Does not copy it.

        Call it before the forward pass: ``guard.batch(number, images, labels)``.
        """
        if self._source.snapshot is not None:
            self._source.snapshot.note(index, inputs)

    def close(self) -> None:
        """End it. All ranks must do so after the same step."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._source.finite is not None:
            self._source.finite.follow({})
            self._unwatch()
        optimizer = self._source.optimizer()
        if optimizer is not None:
            _guards.pop(optimizer, None)
            if isinstance(optimizer, Distributed):
                optimizer.watch = None
        for passes in _Passes.all.values():
            if self._watch in passes.watches:
                passes.watches.remove(self._watch)

    def report(self) -> dict[str, Any]:
        """Return what was compared and found until now, as plain data. Does not block.

        Keys: "steps", "comparisons", "compared" (number of tensors), "last_equal" (the latest step
        after which all were equal; None: never), "skipped" (steps), "overflows" (which GradScaler
        expects), "excluded" (names by reason), "findings" (a dict
        for each, with "text"), and "seconds" (time spent on digests).
        """
        return self._watch.report()


class _Passes:
    """Counts the backward passes in which a DistributedDataParallel reduces its gradients."""

    all: Final[weakref.WeakKeyDictionary[DistributedDataParallel, _Passes]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, model: DistributedDataParallel) -> None:
        self.watches: list[Watch] = []
        self._model = weakref.ref(model)
        self._count = 0
        params = [param for param in model.parameters() if param.requires_grad]
        torch.autograd.graph.register_multi_grad_hook(params, self._began, mode="any")

    @classmethod
    def of(cls, model: DistributedDataParallel) -> _Passes:
        """Return that of a model."""
        if model not in cls.all:
            cls.all[model] = cls(model)
        return cls.all[model]

    def _began(self, _: torch.Tensor) -> None:
        model = self._model()
        if model is None or not model.require_backward_grad_sync:
            return
        for watch in self.watches:
            watch.receive()  # if no step has, since the last time
            watch.send_digests(self._count)
        self._count += 1
        queue_callback(self._ended)

    def _ended(self) -> None:
        for watch in self.watches:
            watch.send_flags()


def _process_set(model: torch.nn.Module | None, optimizer: torch.optim.Optimizer) -> ProcessSet:
    if isinstance(optimizer, Distributed):
        return optimizer._settings.options.process_set
    if isinstance(model, DistributedDataParallel):
        group: Any = model.process_group
        found = getattr(group, "_set", None) or getattr(
            group._get_backend(torch.device("cpu")), "_set", None
        )
        if isinstance(found, ProcessSet):
            return found
    return global_process_set


# -- HORORING_GUARD -------------------------------------------------------------------------------


def guard_optimizer(optimizer: torch.optim.Optimizer, model: Any = None) -> None:
    """Guard an optimizer, if HORORING_GUARD says so."""
    options = from_environment()
    if options is not None and optimizer not in _guards:
        guard = Guard.__new__(Guard)
        guard._begin(model, optimizer, options, by_environment=True)


def guard_parallel_models() -> None:
    """Guard each DistributedDataParallel made from now on, if HORORING_GUARD says so."""
    if from_environment() is None or hasattr(DistributedDataParallel.__init__, "guards"):
        return
    make = DistributedDataParallel.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _Passes.of(self)

    made.guards = True  # type: ignore[attr-defined]
    DistributedDataParallel.__init__ = made  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(_guard_at_first_step)


def _guard_at_first_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Guard the optimizer of a DistributedDataParallel, at its first step."""
    if isinstance(optimizer, Distributed) or optimizer in _guards:
        return
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for model in list(_Passes.all):
        if any(id(param) in held for param in model.parameters()):
            guard_optimizer(optimizer, model)
            return
