"""HierarchicalSGD for Keras 3: an optimizer whose ranks average their weights periodically.

The optimizer chooses the ranks that reduce gradients, inside the train step; weights are averaged
between steps, by `HierarchicalSGDCallback` or by `average_if_due`. The clock is `iterations`, which
Keras saves with the model.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from hororing.extension import (
    OPTIMIZER,
    Compressor,
    NoneCompressor,
    ProcessSet,
    default_name,
    is_elastic,
)
from hororing.keras.extension import Distributed, Settings, backend, checked_settings, wrapped
from hororing.numpy import rank, size
from hororing.toolkit.keras.optim.averages import (
    Array,
    Average,
    Averaging,
    Flight,
    array_of,
    averageable,
)
from hororing.toolkit.large_batch.agreement import obtain_groups
from hororing.toolkit.large_batch.hierarchy import shares
from hororing.toolkit.large_batch.outer import Outer
from hororing.toolkit.large_batch.plan import WHAT, Plan, Request, make_plan


class Hierarchical(Distributed):
    """The mixin of optimizers of hierarchical SGD."""

    _takes_weights = False
    _plan: Plan  # this and what follows: of the class
    _gradient_settings: Settings
    _level_sets: list[ProcessSet]

    @property
    def _averaging(self) -> Averaging:
        averaging: Averaging = self.__dict__.setdefault("_hororing_averaging", Averaging())
        return averaging

    # -- gradients, in the train step -------------------------------------------------------

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> tuple[list[Any], list[Any]]:
        """Reduce the gradients and return updated values."""
        values = list(optimizer_variables)
        at = next(at for at, v in enumerate(self.variables) if v is self._iterations)
        self.__dict__["_steps_here"] = values[at]  # the variable has the value of before tracing
        try:
            return super().stateless_apply(values, grads, trainable_variables)
        finally:
            del self.__dict__["_steps_here"]

    def _reduced(self, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        self._averaging.check_attended()
        warmup_steps = self._plan.hierarchy.warmup_steps
        world, groups = self._settings, self._gradient_settings
        if warmup_steps == 0 or size() == 1:
            return self._reduced_among(grads, variables, groups)
        # Both branches return the same kinds of tensors, and no None.
        live = [at for at, grad in enumerate(grads) if grad is not None]
        dense = [ops.convert_to_tensor(grads[at]) for at in live]
        chosen = [variables[at] for at in live]

        def among(settings: Settings) -> Callable[[], list[Any]]:
            return lambda: list(self._reduced_among(list(dense), chosen, settings))

        steps = self.__dict__.get("_steps_here", self._iterations)
        if self.gradient_accumulation_steps:
            steps = ops.floor_divide(steps, self.gradient_accumulation_steps)
        reduced = backend().choose(ops.less(steps, warmup_steps), among(world), among(groups))
        results = list(grads)
        for at, grad in zip(live, reduced, strict=True):
            results[at] = grad
        return results

    def attend(self) -> None:
        """Announce that the caller will call `average_if_due`; this avoids a warning."""
        self._averaging.attended = True

    # -- averages, between train steps ------------------------------------------------------

    @property
    def steps_done(self) -> int:
        """Updates that are done, warm-up included: `iterations`, the one counter."""
        return int(ops.convert_to_numpy(self.iterations))

    @property
    def last_average(self) -> tuple[int, int] | None:
        """Step and period of the latest average that began; None before the first."""
        return self._averaging.state.get("last")

    def average_if_due(self, weights: Sequence[Any]) -> None:
        """Average `weights`, those of the model, if an average is due. After every update.

        HierarchicalSGDCallback does this. For custom training loops; call it outside traced
        functions. A second call after the same update does nothing.
        """
        plan, steps, state = self._plan, self.steps_done, self._averaging.state
        if state.get("seen") == steps:
            return
        state["seen"] = steps
        if plan.outer is not None and steps == plan.hierarchy.warmup_steps:
            self._begin_outer(weights)
        self._merge(weights, steps)
        level = plan.hierarchy.level_after(steps)
        if level is None:
            return
        is_top = level == len(self._level_sets) - 1
        state["last"] = (steps, plan.hierarchy.levels[level].period)
        trained, buffers = self._parts(weights)
        if plan.delay_steps:
            snapshot = [array_of(variable) for variable in trained]
            others = [array_of(variable) for variable in buffers]
            average = self._start(level, [*snapshot, *others])
            due = steps + plan.delay_steps
            self._averaging.flight = Flight(average, snapshot, others, is_top, due, self._rate())
            return
        means = self._average(level, [*trained, *buffers, *self._momenta()])
        if is_top and plan.outer is not None:
            means[: len(trained)] = self._outer_step(means[: len(trained)], self._rate())
            _assign(trained, means)
        self._reset_momenta()
        if is_top:
            state["averaged"] = steps

    def final_average(self, weights: Sequence[Any]) -> None:
        """Give all ranks the same `weights` now: before evaluation and checkpoints.

        Collective: all ranks call it, after the same step; a rank that calls it alone waits until
        `HORORING_STALL_SHUTDOWN_S`, if that is set. What is averaged is as at a sync point of the
        last level, without an outer step; a delayed average is merged before. Does nothing where
        all ranks agree already.
        """
        plan, steps, state = self._plan, self.steps_done, self._averaging.state
        self._merge(weights, None)
        if state.get("averaged") == steps:
            return
        trained, buffers = self._parts(weights)
        if plan.hierarchy.is_local(steps - 1) and steps > 0:
            self._average(-1, [*trained, *buffers, *self._momenta()], ".final")
        elif buffers:  # after a synchronous step weights are equal, and means might be rounded
            self._average(-1, buffers, ".final")
        self._reset_momenta()
        state["averaged"] = steps

    def _parts(self, weights: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return trained weights and the others, such as the statistics of batch-norm."""
        known = {self._var_key(variable) for variable in self._trainable_variables}
        every = averageable(weights)
        trained = [variable for variable in every if self._var_key(variable) in known]
        return trained, [variable for variable in every if self._var_key(variable) not in known]

    def _start(self, level: int, arrays: Sequence[Array], part: str = "") -> Average:
        plan, members = self._plan, self._level_sets[level]
        share = None if plan.weights is None else shares(plan.weights, members.ranks)[rank()]
        return Average(f"{self._settings.name}.average.{level}{part}", arrays, members, share)

    def _average(self, level: int, variables: Sequence[Any], part: str = "") -> list[Array]:
        means = self._start(level, [array_of(variable) for variable in variables], part).finish()
        _assign(variables, means)
        return means

    def _rate(self) -> float:
        return float(ops.convert_to_numpy(self.learning_rate))

    # -- momenta ----------------------------------------------------------------------------

    def _slots(self) -> list[Any]:
        """Optimizer variables that each belong to a weight; not the sums over passes."""
        others = [self._iterations, getattr(self, "_learning_rate", None)]
        others += [*getattr(self, "_accumulated_gradients", ()), *self._hororing.own]
        own = {id(each) for each in others}
        shapes = {tuple(variable.shape) for variable in self._trainable_variables}
        slots = [variable for variable in self.variables if id(variable) not in own]
        return [each for each in averageable(slots) if tuple(each.shape) in shapes]

    def _momenta(self) -> list[Any]:
        return self._slots() if self._plan.momentum == "average" else []

    def _reset_momenta(self) -> None:
        if self._plan.momentum != "reset":
            return
        for slot in self._slots():
            if "momentum" not in str(slot.name):
                raise ValueError(
                    f"HierarchicalSGD: momentum='reset' is for optimizers that have momentum and "
                    f"nothing else, such as SGD; {type(self).__name__} has '{slot.name}'. Use "
                    "'keep' or 'average'"
                )
            slot.assign(np.zeros_like(array_of(slot)))

    # -- the outer optimizer, and delays ------------------------------------------------------

    def begin_averaging(self, weights: Sequence[Any]) -> None:
        """Begin or resume, before the first step. Records the outer optimizer's start."""
        self.attend()
        self._averaging.state.setdefault("seen", self.steps_done)
        self._begin_outer(weights)

    def _begin_outer(self, weights: Sequence[Any]) -> None:
        state = self._averaging.state
        if self._plan.outer is None or "previous" in state:
            return
        if not self._plan.hierarchy.is_local(self.steps_done):
            return
        trained, _ = self._parts(weights)
        state["previous"] = [_wide(array_of(variable)) for variable in trained]
        state["outer"] = [np.zeros_like(array) for array in state["previous"]]

    def _outer_step(self, means: Sequence[Array], lr: float) -> list[Array]:
        state, outer = self._averaging.state, self._plan.outer
        assert outer is not None
        if "previous" not in state:
            raise RuntimeError(
                "HierarchicalSGD: the outer optimizer does not know its initial weights; "
                "build the model, and call begin_averaging(model.weights) before the first step"
            )
        results = []
        for at, mean in enumerate(means):
            new, state["outer"][at] = outer.update(
                state["previous"][at], _wide(mean), state["outer"][at], lr
            )
            state["previous"][at] = new
            results.append(new.astype(mean.dtype))
        return results

    def _land(self) -> None:
        averaging = self._averaging
        flight, averaging.flight = averaging.flight, None
        if flight is None:
            return
        values = flight.average.finish()
        count = len(flight.snapshot)
        means = values[:count]
        pairs = zip(values[count:], flight.buffers, strict=True)
        buffers = [(mean, mean - old) for mean, old in pairs]
        if flight.is_top and self._plan.outer is not None:
            means = self._outer_step(means, flight.lr)
        changes = [mean - old for mean, old in zip(means, flight.snapshot, strict=True)]
        averaging.state["pending"] = {"due": flight.due, "changes": changes, "buffers": buffers}

    def _merge(self, weights: Sequence[Any], steps: int | None) -> None:
        """Add what a delayed average changes, if it is due after `steps`, or at once for None."""
        flight = self._averaging.flight
        if flight is not None and (steps is None or flight.due <= steps):
            self._land()
        state = self._averaging.state
        pending = state.get("pending")
        if pending is None or (steps is not None and pending["due"] > steps):
            return
        del state["pending"]
        trained, buffers = self._parts(weights)
        for variable, change in zip(trained, pending["changes"], strict=True):
            variable.assign(array_of(variable) + change)
        for variable, (mean, change) in zip(buffers, pending["buffers"], strict=True):
            new = array_of(variable) + change
            if variable.name.endswith(("var", "variance")):  # which is never negative
                new = np.where(new < 0, mean, new)
            variable.assign(new)
        self._reset_momenta()

    def averaging_state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs beside the model, as plain objects and arrays.

        Only with `outer` or `delay_steps`, and for a file of this rank. Pickles. Waits for a
        delayed average.
        """
        self._land()
        state = self._averaging.state
        return {key: list(v) if isinstance(v, list) else v for key, v in state.items()}

    def load_averaging_state(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of `averaging_state`."""
        self._averaging.flight = None
        self._averaging.state = {
            key: list(v) if isinstance(v, list) else v for key, v in state.items()
        }


def _assign(variables: Sequence[Any], values: Sequence[Array]) -> None:
    for variable, value in zip(variables, values, strict=False):
        variable.assign(value)


def _wide(array: Array) -> Array:
    """Return an array of at least 32 bits per number."""
    return array.astype(np.float32) if array.dtype.itemsize < 4 else array


def HierarchicalSGD(
    optimizer: Any,
    *,
    period_group_size_dict: Mapping[int, Any],
    warmup_steps: int = 0,
    gradient_groups: int | str | Sequence[Sequence[int]] | None = "host",
    momentum: str = "keep",
    outer: Outer | None = None,
    weight: float | None = None,
    delay_steps: int = 0,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> Any:
    """Make `optimizer` one of hierarchical SGD, and return it. Collective, with equal arguments.

    Train with `HierarchicalSGDCallback`. `hororing.toolkit.torch.optim.HierarchicalSGD` explains
    the options, with these differences: all floating-point weights of the model are averaged,
    frozen ones and statistics of batch-norm as well; momentum="reset" is for optimizers that have
    momentum only; there is no overlap_backward (use delay_steps), because Keras computes all
    gradients before it calls the optimizer.

    Parameters
    ----------
    optimizer : Optimizer
        Any optimizer of Keras 3 except LossScaleOptimizer.
    name, compression, backward_passes_per_step, average_aggregated_gradients : optional
        As for `hororing.keras.DistributedOptimizer`. Sparse gradients are made dense.

    Raises
    ------
    ValueError, TypeError : on every rank, if an argument of one rank is invalid; the text names the
        level. Also if ranks differ. For LossScaleOptimizer and the policy mixed_float16: an
        overflow would let a rank skip steps that others count. Use mixed_bfloat16. In elastic jobs.

    Examples
    --------
    >>> optimizer = HierarchicalSGD(
    ...     keras.optimizers.SGD(0.1), period_group_size_dict={2: "host", 8: "world"}
    ... )
    >>> model.compile(optimizer, loss="mse")
    >>> model.fit(x, y, callbacks=[HierarchicalSGDCallback()])
    """
    request = Request(
        period_group_size_dict, warmup_steps, gradient_groups, momentum, outer, weight, delay_steps
    )
    checked: list[Settings] = []

    def check() -> dict[str, Any]:
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if scales or keras.config.dtype_policy().name == "mixed_float16":
            raise ValueError(
                "a loss scale that overflows on some ranks would let these skip steps that others "
                "count; use the policy mixed_bfloat16, without LossScaleOptimizer"
            )
        if not isinstance(optimizer, keras.Optimizer):
            raise TypeError(f"optimizer must be one of Keras 3, not {optimizer!r}")
        if isinstance(optimizer, Distributed):
            raise ValueError("optimizer is distributed already; wrap it once")
        checked.append(
            checked_settings(
                name=WHAT if name is None else name,
                compression=compression,
                sparse_as_dense=True,
                backward_passes_per_step=backward_passes_per_step,
                average_aggregated_gradients=average_aggregated_gradients,
            )
        )
        return {"name": checked[0].name}

    if is_elastic():
        raise ValueError(
            f"{WHAT}: with Keras not in an elastic job, in which new ranks would wait for the "
            "others to create it, too: use DistributedOptimizer, or start a job of fixed size"
        )
    plan = make_plan(request, check)
    settings = checked[0]
    if name is None:  # counted now that no rank has failed
        number = default_name(OPTIMIZER).rpartition(".")[2]
        settings = dataclasses.replace(settings, name=f"{WHAT}.{number}")
    if rank() == 0 and size() > 1 and len(plan.gradient_groups) == 1:
        warnings.warn(
            f"{WHAT}: gradient_groups={gradient_groups!r} is one group of all {size()} ranks, so "
            "training stays synchronous after the warm-up; pass smaller groups, or None",
            stacklevel=2,
        )
    gradient_set = obtain_groups(plan.gradient_groups)
    return wrapped(
        optimizer, settings, (), Hierarchical, _plan=plan,
        _gradient_settings=dataclasses.replace(settings, process_set=gradient_set),
        _level_sets=[obtain_groups(level.groups) for level in plan.hierarchy.levels],
    )  # fmt: skip
