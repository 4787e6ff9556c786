"""Optimizers of hierarchical SGD: gradients by phase, averages of weights by the clock.

See hororing/toolkit/torch/optim/hierarchical_sgd.py for how an optimizer becomes one, and
hororing/toolkit/large_batch/hierarchy.py for the clock.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from hororing.errors import HororingInternalError
from hororing.extension import ProcessSet, global_process_set, is_elastic
from hororing.numpy import Max, size
from hororing.toolkit.large_batch.agreement import obtain_groups
from hororing.toolkit.large_batch.plan import make_plan
from hororing.toolkit.torch.optim.averages import Average
from hororing.toolkit.torch.optim.averaging import KEY, Averaging
from hororing.toolkit.torch.optim.early_updates import EarlyUpdates
from hororing.torch.extension import Distributed
from hororing.torch.ops import allreduce


class Hierarchical(Averaging):
    """The mixin of optimizers of hierarchical SGD."""

    param_groups: list[dict[str, Any]]
    _late: Sequence[torch.Tensor]  # not updated in backward

    def _become_distributed(self, passes: int, extra: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._extra = extra
        self._flight = None
        if "_step_supports_amp_scaling" in self.__dict__:  # a fused one of torch: GradScaler would
            self._step_supports_amp_scaling = False  # not ask _agree_on_infinities
        state: Any = self.state
        state.setdefault(KEY, {"step": 0})
        self.backward_passes_per_step = passes
        self._early = EarlyUpdates(self, self._late) if self._request.overlap_backward else None
        if is_elastic():
            super()._become_distributed(passes, extra)
        else:
            self._form_groups()

    @property
    def _ranks_differ(self) -> bool:  # type: ignore[override]
        return self._plan is None or self._plan.hierarchy.is_local(self.steps_done)

    def _join_generation(self) -> None:
        self.regroup()

    def _check_groups(self) -> None:
        if not hasattr(self, "_level_sets"):
            raise RuntimeError(
                "HierarchicalSGD: in an elastic job hvd.elastic.run forms the groups: put the "
                "optimizer into the TorchState, and train in the function that run calls"
            )

    def _form_groups(self) -> None:
        plan = self._plan
        self._level_sets = [obtain_groups(level.groups) for level in plan.hierarchy.levels]
        self._gradient_set = obtain_groups(plan.gradient_groups)
        self._reducing_in: ProcessSet | None = None
        self._follow_clock()

    def regroup(self, **changes: Any) -> None:
        """Form groups anew. Collective: all ranks call it, between steps.

        After another `init()`, whose ranks may be more or fewer, and to change groups or weights:
        `period_group_size_dict`, `gradient_groups` and `weight` may be given again. The counter
        continues. Errors are those of `HierarchicalSGD`; after one, groups are unchanged.
        """
        unknown = sorted(changes.keys() - {"period_group_size_dict", "gradient_groups", "weight"})
        if unknown:
            raise TypeError(f"regroup: {unknown[0]!r} cannot be changed; make the optimizer again")
        with contextlib.suppress(HororingInternalError):  # of the engine before, which has ended
            self._merge(None)
        request = self._request._replace(**changes)
        plan = make_plan(request)
        cls: Any = type(self)
        cls._request, cls._plan = request, plan
        self._form_groups()

    # -- the clock --------------------------------------------------------------------------------

    def _follow_clock(self) -> None:
        """Reduce the gradients of the next step among the ranks of its phase."""
        hierarchy, steps = self._plan.hierarchy, self.steps_done
        members = self._gradient_set if hierarchy.is_local(steps) else global_process_set
        if members is not self._reducing_in:
            options = dataclasses.replace(self._settings.options, process_set=members)
            self._settings = self._settings._replace(options=options)
            super()._become_distributed(self.backward_passes_per_step, self._extra)
            self._reducing_in = members
        if self._early is not None:
            self._early.arm(hierarchy.level_after(steps + 1) is not None)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Reduce gradients, take the wrapped optimizer's step, average weights if due.

        After the warm-up gradients are reduced within this rank's gradient group. A `closure` and
        its loss as well.
        """
        self._check_groups()
        clock, steps = self._clock, self.steps_done
        if self._plan.outer is not None and self._plan.hierarchy.is_local(steps):
            self._begin_outer(clock)
        level = self._plan.hierarchy.level_after(steps + 1)
        if self._early is not None and level is not None:
            result = self._early_step(level, closure, **kwargs)
        else:
            result = super().step(closure, **kwargs)
        clock["step"] = steps = steps + 1
        self._merge(steps)
        if level is not None:
            clock["last"] = (steps, self._plan.hierarchy.levels[level].period)
            self._average(level, steps)
        self._follow_clock()
        return result

    # -- averages in backward ---------------------------------------------------------------------

    def _early_step(self, level: int, closure: Any, **kwargs: Any) -> Any:
        assert self._early is not None
        if closure is not None:
            raise ValueError(
                "HierarchicalSGD: step(closure) cannot be used with overlap_backward=True, which "
                "updates weights inside backward; leave out one of them"
            )
        groups = self.param_groups
        with self._only(self._early.not_updated()):
            result = super().step(**kwargs)
            stepped = self.param_groups
        for group, each in zip(groups, stepped, strict=True):  # its options may have changed
            group.update({key: value for key, value in each.items() if key != "params"})
        self._early.finish()
        if self._buffers:
            self._start(level, self._buffers, True, ".buffers").finish()
        return result

    @contextlib.contextmanager
    def _only(self, params: Iterable[torch.Tensor]) -> Iterator[None]:
        """Restrict the wrapped optimizer to some parameters."""
        chosen = {id(param) for param in params}
        groups = self.param_groups
        self.param_groups = [
            {**group, "params": [param for param in group["params"] if id(param) in chosen]}
            for group in groups
        ]
        try:
            yield
        finally:
            self.param_groups = groups

    def _update_early(self, params: Sequence[torch.Tensor], part: str) -> Average:
        """Step these parameters inside backward and begin to average them."""
        # Without the hooks that torch has put around it: they are for the whole step.
        local: Any = super(Distributed, type(self)).step
        local = local.__wrapped__ if getattr(local, "hooked", False) else local
        if self._plan.outer is not None:
            self._begin_outer(self._clock)
        with torch.no_grad(), self._only(params):
            local(self)
        return self._average_part(params, part)

    def _average_part(self, params: Sequence[torch.Tensor], part: str) -> Average:
        """Begin to average these parameters."""
        level = self._plan.hierarchy.level_after(self.steps_done + 1)
        assert level is not None
        return self._start(level, [self._master(param) for param in params], True, part)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients; AssertionError while some are in flight."""
        super().zero_grad(*args, **kwargs)
        if self._early is not None:
            self._early.forget()

    def _check_nothing_in_flight(self, what: str) -> None:
        super()._check_nothing_in_flight(what)
        if self._early is not None and self._early.begun and not what.startswith("step()"):
            raise AssertionError(
                f"optimizer: {what} after weights were updated inside backward "
                "(overlap_backward=True); call optimizer.step() first"
            )

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, with the counter; waits for a delayed average.

        Between sync points ranks differ: to resume with the same bits, every rank saves its own
        model and state. For one file, call `final_average()` before.
        """
        self._before_state_is_read()
        packed: dict[str, Any] = super().state_dict()
        packed["state"] = {**packed["state"], KEY: _copy(self._clock)}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`. ValueError for that of another optimizer."""
        if KEY not in state_dict["state"]:
            raise ValueError(
                "HierarchicalSGD: this state has no step counter, so it is another optimizer's. To "
                "start with its momenta, load it before HierarchicalSGD wraps the optimizer"
            )
        super().load_state_dict(state_dict)
        self._after_state_is_replaced()

    def _before_state_is_read(self) -> None:
        self._land()

    def _after_state_is_replaced(self) -> None:
        if self._flight is not None:
            self._flight.average.abandon()
            self._flight = None
        state: Any = self.state
        state[KEY] = copy.deepcopy(self._clock)
        if self._early is not None:
            self._early.forget()
        if hasattr(self, "_level_sets"):
            self._follow_clock()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "an optimizer of HierarchicalSGD cannot be copied or pickled; use its state_dict()"
        )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce gradients after every `passes` backward passes from now on."""
        super().set_backward_passes_per_step(passes)
        if self._early is not None:
            self._early.forget()

    def _reduce_for_scaler(self) -> None:
        if self._early is not None:
            raise ValueError(
                "HierarchicalSGD: torch.amp.GradScaler cannot be used with overlap_backward=True, "
                "which updates weights before gradients are unscaled; use bfloat16, or leave out "
                "overlap_backward"
            )
        super()._reduce_for_scaler()

    def _agree_on_infinities(self, found: Iterable[torch.Tensor]) -> None:
        """Make all ranks skip a step if one must, also ranks with other gradients."""
        found = list(found)
        if size() > 1:
            here = torch.tensor(any(map(bool, found)), device="cpu")
            name = f"{self._settings.prefix}.found_inf"
            if bool(allreduce(here, name=name, op=Max)):
                for flag in found:
                    flag.fill_(1.0)


def _copy(clock: dict[str, Any]) -> dict[str, Any]:
    """Copy what later steps replace; tensors in it are never written to."""
    return {key: list(value) if isinstance(value, list) else value for key, value in clock.items()}


# torch wraps the `step` of every class to call its hooks. Ours calls a wrapped one.
Hierarchical.step.hooked = True  # type: ignore[attr-defined]
