"""A mixin for optimizers: gradients are reduced before each update.

Keras calls an optimizer only through `apply` (TensorFlow, torch) or `stateless_apply` (JAX); both
are overridden here. Reduced gradients go to the optimizer's own methods, so clipping, unscaling,
the test for infinities, Keras' own accumulation of gradients and schedules work as in one process
with the whole batch. op=Adasum reduces changes of variables (Maleki et al. 2020, arXiv:2006.02924).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import keras
from keras import ops

from hororing._adapters.fit_callbacks import NOTHING_REDUCED
from hororing._adapters.optimizer_options import Settings
from hororing._adapters.replica_check import Digest, ReplicaCheck, digest
from hororing._engine import membership
from hororing._requests.arguments import (
    OF_A_LAYER,
    Adasum,
    Average,
    Max,
    Sum,
    check_variables,
    check_weight,
    op_name,
)
from hororing._requests.process_sets import global_process_set
from hororing.elastic.variables import Stepper
from hororing.keras.backends import Totals, backend
from hororing.keras.flags import both, is_maximum
from hororing.keras.state import WRONG_ORDER, State, check_is_here, has_failed

T = TypeVar("T")


class Distributed(keras.Optimizer):  # type: ignore[misc]  # Keras declares no types
    """The mixin of distributed optimizers."""

    _settings: Settings  # of the class, which serves one optimizer and its copies
    _takes_weights = True
    built: bool

    @property
    def _hororing(self) -> State:
        state: State = self.__dict__.setdefault("_hororing_state", State())
        return state

    def _become_distributed(self, local_layers: Sequence[Any]) -> None:
        # A variable that is made while a graph is traced is empty until the graph runs.
        count = ops.convert_to_numpy(self.iterations)
        self.__dict__["_hororing_state"] = State(int(count) if count.size else 0)
        self._hororing.local_layers = local_layers
        if membership.is_elastic():
            self._hororing.stepper = backend().stepper()
        if self.built:
            self._make_accumulator(self._trainable_variables)

    @property
    def stepper(self) -> Stepper | None:
        """For an elastic state. None: ranks do not take steps together, as far as known.

        Sub-classes also change variables in other ways.
        """
        settings, state = self._settings, self._hororing
        together = (
            settings.process_set is global_process_set
            and settings.op != Adasum
            and settings.passes == 1
            and not (state.local_variables or state.local_layers)
            and type(self).__bases__[0] is Distributed
        )
        return state.stepper if together else None

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradient of a variable from the reduction: each rank has its own."""
        checked = check_variables([var], "register_local_var", OF_A_LAYER)
        self._hororing.local_variables += checked

    def forget_passes(self) -> None:
        """Begin again to add up gradients: a rank that joins an elastic job has none."""
        if self._hororing.accumulator is not None:
            self._hororing.accumulator.reset()

    @property
    def weight(self) -> Any:
        """The weight of this rank in the average of gradients, such as its number of samples.

        A number, or a tensor, or a function without arguments that returns a tensor. The train step
        calls it for each update; on TensorFlow, a graph calls it once, when it is traced, and a
        number would then stay the same.

        Gradients are then averages weighted by it: the sum of all ranks' gradients times their
        weights, divided by the sum of the weights. A rank with weight 0 contributes nothing; if all
        weights are 0, nothing changes. Either all ranks set one before the first batch, or none
        does. None, the default: all ranks count the same. A copy of the optimizer has none. With
        backward_passes_per_step, each pass has its own weight, and gradients are averages over
        ranks and passes.

        Raises
        ------
        ValueError : for a number that is negative or not finite, and for an op other than Average.
        RuntimeError : the train step was made without a weight; on JAX: during `fit`, not through
            ``self.model.optimizer`` of a callback.
        """
        weight = self._hororing.weight
        if not isinstance(weight, keras.Variable):
            return weight
        check_is_here(weight)
        return ops.convert_to_numpy(weight).item()

    @weight.setter
    def weight(self, weight: Any) -> None:
        state, settings = self._hororing, self._settings
        if state.was_called and (state.weight is None) != (weight is None):
            raise RuntimeError("optimizer: set its weight before the first batch")
        if weight is None:
            state.weight = None
            return
        if not self._takes_weights:
            raise NotImplementedError("optimizer: weight is for DistributedOptimizer only")
        if settings.op != Average:
            raise ValueError(
                f"optimizer: weight is for op=Average only, not op={op_name(settings.op)}"
            )
        if callable(weight):
            state.weight = weight
            return
        number = check_weight(weight, "DistributedOptimizer")
        assert number is not None
        if not 0 <= number < math.inf:
            raise ValueError(f"optimizer: weight={weight} must be finite and not negative")
        if not isinstance(state.weight, keras.Variable):  # a train step reads variables each time
            kind = backend().weight_type()
            state.weight = keras.Variable(number, trainable=False, dtype=kind, name="weight")
            state.own += backend().track(self, [state.weight])
        check_is_here(state.weight)
        state.weight.assign(number)

    @property
    def variables(self) -> list[Any]:
        """What a train step changes. Files do not have what is this rank's own."""
        known: list[Any] = super().variables
        own = {id(each) for each in self._hororing.own if self._hororing.hides_own}
        return [each for each in known if id(each) not in own]

    def save_own_variables(self, store: Any) -> None:
        """Write the state to a file that loads without hororing."""
        with self._hidden():
            super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Read the state from a file."""
        with self._hidden():
            super().load_own_variables(store)

    @contextlib.contextmanager
    def _hidden(self) -> Iterator[None]:
        self._hororing.hides_own = True
        try:
            yield
        finally:
            self._hororing.hides_own = False

    # -- what Keras calls -----------------------------------------------------------------------

    def build(self, variables: Any) -> None:
        """Make the optimizer's variables."""
        super().build(variables)
        self._make_accumulator(variables)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduce the gradients and update the variables."""
        state = self._hororing
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        apply = super().apply
        if state.stateless or not grads or (trainable_variables is None and not self.built):
            apply(grads, trainable_variables)
            return
        state.was_called = True
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(trainable_variables)
            self.built = True
        variables = (
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        self._check_variables_are_known(variables)  # before other ranks wait
        if (state.accumulator or state.weight is not None) and backend().is_stateless(grads):
            self._apply_in_scope(grads, variables)
            return

        def update(totals: list[Any], weight: Any) -> None:
            if self._settings.op != Adasum or not self._settings.reduces:
                looks = self._hororing.flags
                finite = None if looks is None else looks.look(self, totals, variables)
                due, reduced = self._weighted(totals, variables, weight)
                due = both(due, finite)

                def step() -> None:
                    if self.stepper is None:
                        apply(reduced, trainable_variables)
                    else:
                        self.stepper.take(lambda: apply(reduced, trainable_variables), reduced)

                _if(due, step, lambda: None)
                return
            totals = self._reduced_maxima(totals, variables, self._settings)
            combined = self._combined_variables(variables)
            before = [ops.copy(variable) for variable in combined]
            apply(totals, trainable_variables)
            after = self._combine_changes(before, combined, combined)
            for variable, value in zip(combined, after, strict=True):
                variable.assign(value)

        due, take = self._added_up(grads, variables)
        _if(due, lambda: update(*take()), lambda: None)

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> tuple[list[Any], list[Any]]:
        """Reduce the gradients and return updated values."""
        state = self._hororing
        state.was_called = True
        stateless_apply = super().stateless_apply
        before, own = list(trainable_variables), list(optimizer_variables)
        variables = self._trainable_variables
        if len(before) != len(variables):
            stateless_apply(own, grads, before)  # raises Keras' error

        def plain(totals: list[Any], own: list[Any]) -> tuple[list[Any], list[Any]]:
            state.stateless = True
            try:
                weights, others = stateless_apply(own, totals, before)
            finally:
                state.stateless = False
            return list(weights), list(others)

        def update(totals: list[Any], weight: Any, own: list[Any]) -> tuple[list[Any], list[Any]]:
            if self._settings.op != Adasum or not self._settings.reduces:
                due, reduced = self._weighted(totals, variables, weight)
                return _if(due, lambda: plain(reduced, own), lambda: (before, own))
            totals = self._reduced_maxima(totals, variables, self._settings)
            weights, others = plain(totals, own)
            combined = self._combined_variables(variables)
            places = [at for at, each in enumerate(variables) if any(each is c for c in combined)]
            after = self._combine_changes(
                [before[at] for at in places], [weights[at] for at in places], combined
            )
            for at, value in zip(places, after, strict=True):
                weights[at] = value
            return weights, others

        (due, take), own = self._within(own, lambda: self._added_up(list(grads), variables))

        def step() -> tuple[list[Any], list[Any]]:
            (totals, weight), after = self._within(own, take)
            return update(totals, weight, after)

        return _if(due, step, lambda: (before, own))

    def _apply_in_scope(self, grads: list[Any], variables: Sequence[Any]) -> None:
        """Update variables that Keras has given a scope, as those of a MultiOptimizer on JAX."""
        now = [variable.value for variable in variables]
        values = self.stateless_apply([each.value for each in self.variables], grads, now)
        for variable, value in zip(
            [*variables, *self.variables], itertools.chain(*values), strict=True
        ):
            variable.assign(value)

    def _within(self, values: list[Any], function: Callable[[], T]) -> tuple[T, list[Any]]:
        """Call `function`, for which the optimizer's variables have these values.

        Return its result and the values after it.
        """
        mapping = list(zip(self.variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            result = function()
        return result, [scope.get_current_value(variable) for variable in self.variables]

    def finalize_variable_values(self, var_list: Any) -> None:
        """End `model.fit`. RuntimeError if it trained without a single reduction.

        MismatchError if ranks have trained different variables.
        """
        var_list = list(var_list)
        super().finalize_variable_values(var_list)
        state = self._hororing
        if not self._settings.reduces or not var_list or has_failed(sys._getframe(1)):
            return
        if state.was_called:
            self._compare_variables()
            return
        if int(ops.convert_to_numpy(self.iterations)) > state.first_iteration:
            raise RuntimeError(NOTHING_REDUCED)

    def _compare_variables(self) -> None:
        """Compare the ranks' variables, once. They may be broadcast after the first execution."""
        check = self._hororing.check
        if check is None:
            remedy = (
                "Pass callbacks.BroadcastGlobalVariablesCallback(0) to model.fit. "
                "HORORING_CHECK_PARAMETERS=0 turns this check off"
            )
            check = ReplicaCheck("DistributedOptimizer", self._settings.process_set, remedy)
            self._hororing.check = check
        if check.is_due and type(self).__bases__[0] is Distributed:
            variables = self._combined_variables(self._trainable_variables)
            arrays = [ops.convert_to_numpy(variable) for variable in variables]
            digests = [
                Digest(name, f"{array.dtype}{[*array.shape]}", digest(array))
                for name, array in zip(self._names(variables), arrays, strict=True)
            ]
            check.start(f"{self._settings.name}/parameters", lambda: digests)
            if check.is_started:
                check.finish()

    def __setattr__(self, name: str, value: Any) -> None:
        # LossScaleOptimizer does this to its inner optimizer when it is created.
        if name == "loss_scale_factor":
            caller = sys._getframe(1).f_locals.get("self")
            if caller is not self and isinstance(caller, keras.optimizers.LossScaleOptimizer):
                raise ValueError(WRONG_ORDER)
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a similar distributed optimizer, without variables yet, as Keras does."""
        return type(self).from_config(self.get_config())

    # -- the parts of an update -----------------------------------------------------------------

    def _make_accumulator(self, variables: Any) -> None:
        state = self._hororing
        if self._settings.passes > 1 and state.accumulator is None:
            maxima = [is_maximum(variable) for variable in variables]
            state.accumulator = backend().accumulator(variables, maxima, self._settings)
            state.own += backend().track(self, state.accumulator.variables)

    def _added_up(self, grads: list[Any], variables: Sequence[Any]) -> Totals:
        """Add up gradients. Return whether they are due (None: always), and what takes them."""
        accumulator, weight = self._hororing.accumulator, self._hororing.weight
        if weight is not None:
            weight = weight if isinstance(weight, keras.Variable) else weight()
            weight = ops.cast(ops.convert_to_tensor(weight), backend().weight_type())
        if accumulator is None:
            return None, lambda: (grads, weight)
        places = [self._get_variable_index(variable) for variable in variables]
        if self._hororing.places not in ([], places):
            raise ValueError(
                f"{self._settings.name}: with backward_passes_per_step every call must have the "
                "same variables; make an optimizer for each part that is updated in turns"
            )
        self._hororing.places = places
        return accumulator.add(grads, places, weight)

    def _reduced(self, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients reduced over the ranks, except for those of local variables."""
        return self._reduced_among(grads, variables, self._settings)

    def _weighted(
        self, grads: list[Any], variables: Sequence[Any], weight: Any
    ) -> tuple[Any, list[Any]]:
        """Return the reduced gradients, and whether any rank counts (None without weights)."""
        if weight is None:
            return None, self._reduced(grads, variables)
        settings = dataclasses.replace(self._settings, weight=weight)
        reduced = self._reduced_among(grads, variables, settings)
        total = backend().reduce(
            [ops.reshape(weight, (1,))], [f"{settings.name}/sum_of_weights"], [],
            settings.for_maxima(Sum),
        )[0]  # fmt: skip
        return total[0] > 0, reduced

    def _reduced_among(
        self, grads: list[Any], variables: Sequence[Any], settings: Settings
    ) -> list[Any]:
        if not settings.reduces:
            return grads
        local = self._local_keys()
        results = self._reduced_maxima(grads, variables, settings)
        weights = []
        for at, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
            if grad is None or is_maximum(variable):
                continue
            if self._var_key(variable) not in local:
                weights.append(at)
            elif settings.scale_local:
                results[at] = ops.divide(grad, len(settings.process_set.ranks))
        self._reduce_at(weights, results, variables, settings)
        return results

    def _reduced_maxima(
        self, grads: list[Any], variables: Sequence[Any], settings: Settings
    ) -> list[Any]:
        """Reduce values that are not gradients but replace their variables: scales of float8.

        The result is the maximum, as when Keras accumulates them.
        """
        results = list(grads)
        maxima = [
            at
            for at, (grad, variable) in enumerate(zip(grads, variables, strict=True))
            if grad is not None and is_maximum(variable)
        ]
        self._reduce_at(maxima, results, variables, settings.for_maxima(Max))
        return results

    def _reduce_at(
        self, places: list[int], results: list[Any], variables: Sequence[Any], settings: Settings
    ) -> None:
        if not places:
            return
        chosen = [variables[at] for at in places]
        reduced = backend().reduce(
            [results[at] for at in places], self._names(chosen), self._groups(chosen, settings),
            settings,
        )  # fmt: skip
        for at, result in zip(places, reduced, strict=True):
            results[at] = result

    def _combined_variables(self, variables: Sequence[Any]) -> list[Any]:
        """Return the variables whose changes op=Adasum combines."""
        local = self._local_keys()
        return [v for v in variables if not is_maximum(v) and self._var_key(v) not in local]

    def _combine_changes(
        self, before: Sequence[Any], after: Sequence[Any], variables: Sequence[Any]
    ) -> list[Any]:
        """Return the previous values plus the Adasum of the changes by every rank's own update."""
        changes = [ops.subtract(new, old) for new, old in zip(after, before, strict=True)]
        settings = self._settings
        combined = backend().reduce(
            changes, self._names(variables), self._groups(variables, settings), settings
        )
        values = [ops.add(old, change) for old, change in zip(before, combined, strict=True)]
        return [
            value if getattr(variable, "constraint", None) is None else variable.constraint(value)
            for value, variable in zip(values, variables, strict=True)
        ]

    def _local_keys(self) -> set[Any]:
        state = self._hororing
        layers = (weight for layer in state.local_layers for weight in layer.trainable_weights)
        return {self._var_key(variable) for variable in (*state.local_variables, *layers)}

    def _names(self, variables: Sequence[Any]) -> list[str]:
        """Return readable names by place, equal on all ranks regardless of Keras' numbers."""
        return [
            f"{self._settings.name}/{self._get_variable_index(variable)}."
            f"{str(variable.name).partition(':')[0].rpartition('/')[2]}"
            for variable in variables
        ]

    def _groups(self, variables: Sequence[Any], settings: Settings) -> list[list[int]]:
        """Places among `variables` that are reduced in one request."""
        groups = settings.groups
        if isinstance(groups, int):
            bounds = [number * len(variables) // max(groups, 1) for number in range(groups + 1)]
            parts = [list(range(*pair)) for pair in itertools.pairwise(bounds)]
            return [part for part in parts if part]
        place_of = {self._var_key(variable): at for at, variable in enumerate(variables)}
        known = {self._var_key(variable) for variable in self._trainable_variables}
        result: list[list[int]] = []
        for number, group in enumerate(groups):
            keys = [self._var_key(variable) for variable in group]
            if not known.issuperset(keys):
                raise ValueError(f"groups[{number}] holds a variable that is not the optimizer's")
            if any(place_of.get(key) in each for key in keys for each in result):
                raise ValueError(f"a variable of groups[{number}] occurs in groups twice")
            result.append([place_of[key] for key in keys if key in place_of])
        return [part for part in result if part]


def _if(due: Any, action: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """Call `action` if `due`, or None."""
    return action() if due is None else backend().choose(due, action, otherwise)


def shared_variables(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer, or None, without what each rank has of its own."""
    parts = (optimizer, *getattr(optimizer, "optimizers", ()))  # of a MultiOptimizer
    own = {
        id(each) for part in parts if isinstance(part, Distributed) for each in part._hororing.own
    }
    return [each for each in getattr(optimizer, "variables", ()) if id(each) not in own]
