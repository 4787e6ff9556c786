"""A state of variables, for TensorFlow and Keras. Each framework defines how to read them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

import hororing.numpy as hvd
from hororing._engine import state
from hororing._requests import handles as request_handles
from hororing._requests import objects
from hororing.elastic.stepped import SteppedState
from hororing.elastic.steps import Steps

# The name is always the same, because later ranks have counted fewer calls.
broadcast = functools.partial(objects.broadcast_object, root_rank=0, name="elastic.state")

Array = np.ndarray[Any, np.dtype[Any]]


class VariablesState(SteppedState):
    """A state of variables and plain objects. A base class.

    `save` copies the variables into host memory.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(broadcast, state.rank, **kwargs)
        self._saved_values: list[Array] = self._read()

    def _variables(self) -> list[Any]:
        """Return the variables, in the same order on every rank."""
        raise NotImplementedError

    def _array(self, variable: Any) -> Array:
        """Return the value of a variable."""
        raise NotImplementedError

    def _parts(self) -> dict[str, str]:
        return {**super()._parts(), **forms("variable", self._same_everywhere())}

    def _same_everywhere(self) -> Iterable[Any]:
        """Return the variables that every rank has from the beginning, in the same order."""
        return self._variables()

    def _read(self) -> list[Array]:
        return [np.array(self._array(each)) for each in self._variables()]

    def _assign(self, values: Sequence[Array]) -> None:
        for variable, value in zip(self._variables(), values, strict=True):
            variable.assign(value)

    def save(self) -> None:
        """Copy the values and the objects."""
        values = self._read()
        super().save()
        self._saved_values = values

    def restore(self) -> None:
        """Restore what was saved last."""
        self._assign(self._saved_values)
        super().restore()

    def _kept(self) -> Any:
        return self._saved_values, super()._kept()

    def _take(self, kept: Any) -> None:
        values, objects = kept
        self._assign(values)
        self._saved_values = values
        super()._take(objects)

    def sync(self) -> None:
        """Send the values that rank 0 has saved last to all ranks."""
        # Rank 0 determines the variables, because a new optimizer may lack some.
        kinds = broadcast([(each.shape, each.dtype.name) for each in self._saved_values])
        values = self._saved_values
        if state.rank() != 0:
            values = [np.empty(shape, dtype) for shape, dtype in kinds]
        send(values)
        super().sync()
        if state.rank() != 0:
            self._saved_values = values
            self._assign(values)


def forms(kind: str, variables: Iterable[Any]) -> dict[str, str]:
    """Return the forms of variables. Their names may depend on what else a process has made."""
    return {
        f"{kind} {number}": f"{getattr(each.dtype, 'name', each.dtype)} {each.shape}"
        for number, each in enumerate(variables)
    }


def send(arrays: Iterable[Array]) -> None:
    """Fill the arrays of all ranks with those of rank 0."""
    handles = [
        # As bytes, because some weights have types that only Keras has.
        hvd.broadcast_async_(each.reshape(-1).view(np.uint8), 0, name=f"elastic.state.{number}")
        for number, each in enumerate(arrays)
    ]
    request_handles.wait_all(handles)


class Stepper(Protocol):
    """Takes the steps of an optimizer, and informs a state about them."""

    def take(self, apply: Callable[[], Any], gradients: Sequence[Any]) -> None:
        """Take a step by `apply` when the gradients are reduced, or skip it."""

    def attach(self, steps: Steps | None) -> None:
        """From now on count steps for `steps`. With None, do not count."""


class ModelState(VariablesState):
    """A state of a Keras model, its optimizer and plain objects, as attributes. A base class.

    Steps can be transactions if there is a `Stepper` for the optimizer, with Keras 3. Steps change
    trainable weights and the optimizer's variables. All other variables of the model are small and
    copied at each mark: averages of batches, random generators.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not (model.built and model.weights):  # `build` of a sub-class may build no layers
            raise ValueError(
                f"{type(self).__name__}: the model has no variables yet; give it an Input, or call "
                "it with a batch"
            )
        self.model = model
        self.optimizer: Any = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if self.optimizer is not None:
            self._build(self.optimizer, model.trainable_variables)
        self._saved_here: list[tuple[Any, Array]] = []
        super().__init__(**kwargs)

    def save(self) -> None:
        """Copy the values and the objects, and this rank's own random generators."""
        write_back = getattr(self.model, "jax_state_sync", None)  # Keras on JAX trains copies
        if write_back is not None:
            write_back()
        super().save()
        sent = {id(each) for each in self._variables()}
        self._saved_here = [
            (each, np.array(self._array(each)))
            for each in getattr(self.model, "variables", ())
            if id(each) not in sent
        ]

    def restore(self) -> None:
        """Restore what was saved last."""
        super().restore()
        for variable, value in self._saved_here:
            variable.assign(value)

    def _assign(self, values: Sequence[Array]) -> None:
        super()._assign(values)
        renew_constants(self.model)

    def sync(self) -> None:
        """Send the values that rank 0 has saved last to all ranks; passes begin again."""
        super().sync()
        inner = getattr(self.optimizer, "inner_optimizer", None)  # distributed with Keras 2
        for each in (self.optimizer, inner):
            getattr(each, "forget_passes", lambda: None)()

    # -- every step as a transaction; see hororing.elastic.steps ---------------------------------

    def _same_everywhere(self) -> Iterable[Any]:
        return list(self.model.weights)  # not those that an optimizer makes later

    def _stepper(self) -> Stepper | None:
        """The object that takes the optimizer's steps, if all ranks take them together."""
        return getattr(self.optimizer, "stepper", None)

    def _can_agree_on_steps(self) -> bool:
        if self._stepper() is None:
            return False
        stepped = {id(each) for each in self.optimizer._trainable_variables}
        return all(id(each) in stepped for each in self.model.trainable_variables)

    def _attach(self, steps: Steps | None) -> None:
        stepper = self._stepper()
        if stepper is not None:
            stepper.attach(steps)

    def _mark(self) -> None:
        self._marked_values = [(each, np.array(self._array(each))) for each in self._beside()]
        super()._mark()

    def _go_back(self) -> None:
        for variable, value in self._marked_values:
            variable.assign(value)

    def _sync_marked(self) -> None:
        sent = {id(each) for each in self.model.weights}
        weights = [each for each in self._beside() if id(each) in sent]
        values = [np.array(self._array(each)) for each in weights]
        send(values)
        for variable, value in zip(weights, values, strict=True):
            variable.assign(value)

    def _digest(self) -> int:
        beside = {id(each) for each in self._beside()}
        return digest_of(
            np.asarray(self._array(each)) for each in self._variables() if id(each) not in beside
        )

    def _beside(self) -> list[Any]:
        """The variables that the optimizer's steps do not change."""
        layers = self.model._flatten_layers()
        made = {id(each) for layer in layers for each in layer._trainable_variables}
        return [each for each in self.model.variables if id(each) not in made]

    # --------------------------------------------------------------------------------------------

    def _build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Create the optimizer's variables, which otherwise are made by the first step."""
        if not optimizer.built:
            optimizer.build(variables)

    def _variables(self) -> list[Any]:
        held = () if self.optimizer is None else self.optimizer.variables
        return [*self.model.weights, *(held() if callable(held) else held)]


def renew_constants(model: Any) -> None:
    """Update the constants that Normalization layers have derived from their weights."""
    for layer in model._flatten_layers():
        if hasattr(layer, "adapt_mean"):
            layer.finalize_state()


def digest_of(arrays: Iterable[Array]) -> int:
    """A hash of the bits of all variables, below 2**62."""
    total = 0
    for each in arrays:
        flat = np.ascontiguousarray(each).reshape(-1)
        words = flat.view(np.int32 if flat.itemsize % 4 == 0 else np.uint8)
        total += int(words.sum(dtype=np.int64))
    return total % (1 << 62)
