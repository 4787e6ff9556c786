"""The mixin of distributed optimizers: gradients are reduced in backward().

See hororing/torch/optimizer.py for how an optimizer becomes one.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hororing._adapters.optimizer_options import Reduction, checked_passes
from hororing._requests import arguments
from hororing._requests.compression import StatefulCompression
from hororing._requests.process_sets import global_process_set
from hororing.elastic.steps import Steps
from hororing.torch._optimizer.first_reduction import Watcher
from hororing.torch._optimizer.following import Following
from hororing.torch._optimizer.grouping import Grouping
from hororing.torch._optimizer.reducer import Reducer, process_set_changed
from hororing.torch._optimizer.step import describe_in_flight
from hororing.torch._optimizer.weights import Weights, checked_weight
from hororing.torch._tensor.verbs import verbs


class Settings(NamedTuple):
    """The settings that make a copy of the optimizer distributed, too. Positions count all
    parameters in the order of the groups.
    """

    options: Reduction
    prefix: str
    names: tuple[str, ...]  # by position
    groups: tuple[tuple[int, ...], ...]  # positions
    grouping: type[Grouping] = Grouping
    method: StatefulCompression | None = None  # of the grouping


class Distributed(torch.optim.Optimizer):
    """The mixin of distributed optimizers."""

    _settings: Settings  # of the class, which serves one optimizer and its copies
    _reducer_type: type[Following] = Reducer
    _reducer: Following | None = None  # None if this rank reduces with no other rank
    # The steps of its elastic state, if each step is a transaction of all ranks.
    _steps: Steps | None = None
    _watch: Watcher | None = None  # of its guard
    _ranks_differ = False  # ranks may have different parameters, and nothing is wrong
    _why_no_weights = ""  # the reason, if its backward passes cannot have weights
    backward_passes_per_step: int
    _parameter_names: dict[torch.Tensor, str]

    def _become_distributed(self, passes: int, extra: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Start to reduce gradients; `extra` names parameters that may be added later."""
        settings = self._settings
        params = parameters(self)
        # Parameters of groups that were added later have no names there.
        named = list(zip(settings.names, params, strict=False))
        self.backward_passes_per_step = passes
        self._parameter_names = {param: name for name, param in named}
        self._should_synchronize = True
        self._synchronized_by_user = False
        weight = self.weight
        if self._reducer is not None:
            self._reducer.release()
        self._reducer = None
        self._generation = settings.options.process_set.generation
        if settings.options.reduces:
            self._start_reducing([*extra, *named])
        self.weight = weight

    def _start_reducing(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        settings, params = self._current_settings(), parameters(self)
        wanted = [[params[position] for position in group] for group in settings.groups]
        grouping = settings.grouping(settings.options, settings.prefix, wanted, settings.method)
        self._reducer = self._reducer_type(
            settings.options, self.backward_passes_per_step, self, named, settings.prefix, grouping
        )
        self._reducer.check.is_off = self._ranks_differ
        self._parameter_names = self._reducer.names
        self._reducer.watch = self._watch

    @property
    def watch(self) -> Watcher | None:
        """What compares replicas in reductions: hororing/torch/guard.py."""
        return self._watch

    @watch.setter
    def watch(self, watch: Watcher | None) -> None:
        self._watch = watch
        if self._reducer is not None:
            self._reducer.watch = watch

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # copy.deepcopy calls this with new parameters, load_state_dict with known ones.
        if "_reducer" not in self.__dict__:
            self._become_distributed(type(self)._passes_of_copies, [])

    _passes_of_copies = 1

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the wrapped optimizer, because this class exists only in this process."""
        plain = type(self).__bases__[-1]
        return copyreg._reconstructor, (plain, object, None), self.__getstate__()  # type: ignore[attr-defined]

    def __copy__(self) -> Distributed:
        return self._copied(self.__getstate__())

    def __deepcopy__(self, memo: dict[int, Any]) -> Distributed:
        return self._copied(copy.deepcopy(self.__getstate__(), memo))

    def _copied(self, state: dict[str, Any]) -> Distributed:
        """Return a distributed optimizer of the same kind. `state` contains its parameters."""
        made = type(self).__new__(type(self))
        made._settings = self._current_settings()
        made.__setstate__(state)
        return made

    def _current_settings(self) -> Settings:
        """The settings by the positions of today: parameters may have been removed or added."""
        settings, known = self._settings, self._parameter_names
        names = [
            known.get(param, f"{settings.prefix}.{number}.{index}")
            for number, group in enumerate(self.param_groups)
            for index, param in enumerate(group["params"])
        ]
        position_of = {name: position for position, name in enumerate(names)}
        groups = [
            tuple(position_of[name] for at in group if (name := settings.names[at]) in position_of)
            for group in settings.groups
        ]
        return settings._replace(names=tuple(names), groups=tuple(filter(None, groups)))

    # -- attributes that scripts written for Horovod read ---------------------------------------

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        """The parameters whose gradients are reduced."""
        params = parameters(self) if self._reducer is not None else []
        return {param for param in params if param.requires_grad}

    @property
    def _handles(self) -> dict[torch.Tensor, tuple[int | None, None]]:
        """The handle of each gradient in flight; None while it waits for others of its group."""
        handles = {} if self._reducer is None else self._reducer.handles
        return {param: (handle or None, None) for param, handle in handles.items()}

    @property
    def _groups(self) -> list[list[torch.Tensor]] | None:
        """The parameters of each group; None without groups, or while they are not found."""
        params = parameters(self)
        wanted = [[params[at] for at in group] for group in self._current_settings().groups]
        return wanted or (self._reducer.grouping.found if self._reducer is not None else []) or None

    # ---------------------------------------------------------------------------------------------

    @property
    def agrees_on_steps(self) -> bool:
        """Whether a step changes parameters only when the gradients of all ranks are reduced.

        Sub-classes also change parameters in other ways: they combine changes, or average. Other
        groupings agree on something in steps.
        """
        settings = self._settings
        whole = settings.options.process_set is global_process_set
        plain = type(self).__bases__[0] is Distributed and settings.grouping is Grouping
        return whole and plain

    @property
    def _pass_weights(self) -> Weights | None:
        return None if self._reducer is None else self._reducer.step.weights

    @property
    def weight(self) -> float | None:
        """The weight of the next backward pass: its number of samples, or of tokens.

        A finite, non-negative number; set it before `backward()`. It stays until it is set again.
        Gradients are then averages over ranks, and over the passes of a step, weighted by it: the
        sum of all gradients times their weights, divided by the sum of the weights. A pass with
        weight 0 and a rank that has joined contribute nothing. A rank without a backward pass
        contributes zeros, with the current weight. If all weights are 0, gradients are 0 and
        `step()` changes nothing. Either all ranks set a weight, or none does. None, the default:
        ranks have equal weights, and gradients add up over passes. It has no effect on ranks
        outside of `process_set`.

        Raises
        ------
        ValueError : the weight is negative or not finite, or the op is not Average.
        """
        return None if self._pass_weights is None else self._pass_weights.weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        options = self._settings.options
        weight = checked_weight(weight, options.op)
        if weight is not None and self._why_no_weights:
            raise NotImplementedError(f"optimizer: weight cannot be used: {self._why_no_weights}")
        if self._reducer is None and weight is not None and options.process_set.included():
            self._start_reducing([(name, param) for param, name in self._parameter_names.items()])
        if self._reducer is not None:
            if (weight is None) != (self.weight is None):
                self._check_nothing_in_flight(f"weight = {weight}")
            self._reducer.set_weight(weight)

    def synchronize(self) -> None:
        """Reduce the gradients, unless `backward()` has done so.

        The last of `backward_passes_per_step` passes reduces. Call this if this rank had fewer
        passes, none, or a failed one. Parameters without a gradient get a zero one, which is
        reduced as well.
        """
        self._reduce()
        self._synchronized_by_user = True

    def _reduce(self) -> None:
        if self._reducer is None:
            process_set = self._settings.options.process_set
            if self._generation != process_set.generation:  # this rank may be a member by now
                raise process_set_changed(process_set)
            if self._watch is not None:
                self._watch.send_flags()
        elif not self._reducer.synchronized:
            self._synchronized_by_user = False
            self._reducer.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside the context, `step()` does not reduce: `backward()` or `synchronize()` has."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Take the wrapped optimizer's step, after reducing gradients unless `backward()` has.

        The gradients that `closure` computes are reduced each time it is called, and so is its
        loss, so that all ranks make the same decisions.
        """
        self._opt_called = True  # learning rate schedulers check it
        if closure is not None:
            return self._step_with_closure(closure, **kwargs)
        if self._should_synchronize:
            if self._reducer is not None and self._synchronized_by_user:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(); gradients are not reduced a second time. Neither is "
                    "needed: the gradients are reduced when backward() returns",
                    stacklevel=3,  # torch.compiler.disable adds a frame
                )
            self._reduce()
        else:
            self._check_nothing_in_flight("step() inside skip_synchronize()")
            if self._reducer is not None:
                self._reducer.step.refuse_unsent("step() inside skip_synchronize()")
        all_zero = self._pass_weights is not None and self._pass_weights.all_zero
        skips = self._watch is not None and self._watch.take_skip()
        self._start_over()
        if all_zero or skips:
            return None
        if self._steps is None:
            return super().step(**kwargs)
        if self._steps.keeps_parameters and self._reducer is not None:
            self._reducer.step.await_device()
        return self._steps.take(functools.partial(super().step, **kwargs))

    def _step_with_closure(self, closure: Callable[[], Any], **kwargs: Any) -> Any:
        if self._reducer is None:
            return super().step(closure, **kwargs)
        if self._steps is not None:
            self._steps.inconsistent = True  # parameters change before all ranks have stepped

        def reduced() -> Any:
            loss = closure()
            self._reduce()  # only for a rank without a backward pass: the others have reduced in it
            if self._pass_weights is not None and self._pass_weights.all_zero:
                raise ValueError("optimizer: step(closure) where the weights of all ranks are 0")
            if self._watch is not None and self._watch.take_skip():
                raise FloatingPointError("optimizer: a guard cannot skip a part of step(closure)")
            return self._reduced_loss(loss)

        result = super().step(reduced, **kwargs)
        self._start_over()
        return result

    def _on_any_rank(self, what: str, here: bool) -> bool:
        name = f"{self._settings.prefix}.{what}"
        return bool(self._agree(torch.tensor(here, device="cpu"), name, arguments.Max))

    def _reduced_loss(self, loss: Any) -> Any:
        name, op = f"{self._settings.prefix}.closure_loss", self._settings.options.op
        weight = None if self._pass_weights is None else self._pass_weights.sent
        if isinstance(loss, float | int):
            number = torch.tensor(loss, dtype=torch.float64, device="cpu")
            return self._agree(number, name, op, weight).item()
        if isinstance(loss, torch.Tensor):
            return self._agree(loss.detach(), name, op, weight)
        return loss  # None, or an object of the caller's

    def _agree(
        self, value: torch.Tensor, name: str, op: int, weight: float | None = None
    ) -> torch.Tensor:
        members = self._settings.options.process_set
        return verbs.allreduce(value, name=name, op=op, process_set=members, weight=weight)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients. AssertionError while some are being reduced: `backward()` failed."""
        self._check_nothing_in_flight("zero_grad()")
        self._start_over()
        if self._reducer is not None and self.weight is not None:
            self._reducer.follow()  # as in `set_weight`
        super().zero_grad(*args, **kwargs)  # a class of the script's may take no argument

    def _check_nothing_in_flight(self, what: str) -> None:
        in_flight = self._reducer.in_flight if self._reducer is not None else []
        if in_flight:
            raise AssertionError(f"optimizer: {what} while {describe_in_flight(in_flight)}")

    def _start_over(self) -> None:
        self._synchronized_by_user = False
        if self._reducer is not None:
            self._reducer.restart()

    def _agree_on_infinities(self, found: Iterable[torch.Tensor]) -> None:
        """Make all ranks skip a step if one must. Nothing to do here: all have the same gradients.

        `found` are flags of `torch.amp.GradScaler`, one per device.
        """

    def _reduce_for_scaler(self) -> None:
        """Reduce the gradients that `torch.amp.GradScaler` is about to check."""
        self._reduce()

    def _note_scale(self, scale: torch.Tensor) -> None:
        """Note the scale of `torch.amp.GradScaler`, a tensor that it changes in place."""
        if self._reducer is not None:
            self._reducer.grouping.note_scale(scale)

    def _join_generation(self) -> None:
        """Prepare for new members, on all ranks. Nothing to do here.

        `hororing.elastic.run` calls it on all ranks, before they receive the state.
        """

    # What the grouping keeps in the state.

    def _kept(self) -> Any:
        return None if self._reducer is None else self._reducer.grouping.kept()

    def _adopt(self, kept: Any) -> None:
        if self._reducer is not None:
            self._reducer.grouping.adopt(kept)

    def _before_state_is_read(self) -> None:
        """Update `state`, which is about to be saved or sent."""
        if kept := self._kept():
            self.state[self._settings.grouping.state_key] = kept  # type: ignore[index]

    def _after_state_is_replaced(self) -> None:
        """Adopt a `state` from another rank or a file."""
        key: Any = self._settings.grouping.state_key
        if key:
            self._adopt(self.state.pop(key, {}))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state, with what the grouping keeps on this rank: the rest of compression."""
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        if kept := self._kept():
            state["state"][self._settings.grouping.state_key] = dict(kept)
        return state

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Forget gradients in flight, then load."""
        if self._reducer is not None:
            self._reducer.abandon()
        self._start_over()
        key = self._settings.grouping.state_key
        if not key:
            super().load_state_dict(state_dict, *args, **kwargs)
            return
        held = dict(state_dict["state"])
        kept = held.pop(key, {})
        super().load_state_dict({**state_dict, "state": held}, *args, **kwargs)
        self._adopt(copy.deepcopy(kept))  # it changes in place

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on, reduce gradients after every `passes` backward passes."""
        self.backward_passes_per_step = passes = checked_passes(passes)
        type(self)._passes_of_copies = passes
        if self._reducer is not None:
            self._reducer.restart(passes)
            self._reducer.set_weight(self.weight)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; their gradients are reduced from now on."""
        super().add_param_group(param_group)
        if self._reducer is not None:
            self._reducer.follow()
            self._parameter_names = self._reducer.names


# torch wraps the `step` of every class to call its hooks. Ours calls a wrapped one already.
Distributed.step.hooked = True  # type: ignore[attr-defined]


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters, in the order of the groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]
