"""Elastic training with TensorFlow::

    import hororing.tensorflow as hvd

    hvd.init()
    model = ...  # built
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)

    @hvd.elastic.run
    def train(state):
        ...
        state.commit()

    train(state)

Start it with hororun --min-np. See docs/elastic.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from hororing import elastic
from hororing._engine import membership
from hororing.elastic import *  # noqa: F403
from hororing.elastic import run_fn
from hororing.elastic.loop import reset
from hororing.elastic.variables import ModelState, Stepper, VariablesState
from hororing.tensorflow._tensor.requests import convert_error
from hororing.tensorflow.steps import CountedSteps, count_steps_of


def run(func: Callable[..., Any]) -> Callable[..., Any]:  # type: ignore[no-redef]
    """Like `hororing.elastic.run`, also for the errors that graphs raise."""
    return run_fn(func, reset, convert_error)


class TensorFlowState(VariablesState):
    """A state of TensorFlow variables and plain objects.

    >>> state = TensorFlowState([weights, bias], batch=0)

    Parameters
    ----------
    variables : iterable, optional
        The same on every rank; None: the global variables of a graph of TensorFlow 1.
    session : Session, optional
        The TensorFlow 1 session of the variables; None: the default session, if there is one.
    kwargs : dict
        The objects by name, which become attributes.
    """

    def __init__(
        self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        if variables is None:
            variables = tf.compat.v1.global_variables()
        self.variables = list(variables)
        self.session = session
        super().__init__(**kwargs)

    def _session(self) -> Any:
        if tf.executing_eagerly():
            return None
        return self.session or tf.compat.v1.get_default_session()

    def _variables(self) -> list[Any]:
        return self.variables

    def _array(self, variable: Any) -> Any:
        session = self._session()
        return variable.numpy() if session is None else session.run(variable)

    def _assign(self, values: Sequence[Any]) -> None:
        session = self._session()
        if session is None:
            super()._assign(values)
            return
        for variable, value in zip(self.variables, values, strict=True):
            variable.load(value, session)


class TensorFlowKerasState(ModelState):
    """A state of a model of tf.keras, its optimizer and plain objects, as attributes.

    >>> state = TensorFlowKerasState(model, optimizer, epoch=0, batch=0)

    Parameters
    ----------
    model : Model
        Must be built.
    optimizer : Optimizer, optional
        None: that of the compiled model, if any.
    backend : module, optional
        Horovod's; no effect.
    kwargs : dict
        The objects by name.

    Raises
    ------
    ValueError : the model has no variables yet.
    """

    _counted: CountedSteps | None = None

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(model, optimizer, **kwargs)
        # Optimizers of Keras 2 have no `stateless_apply`.
        plain = not hasattr(self.optimizer, "stepper")
        if membership.is_elastic() and plain and hasattr(self.optimizer, "stateless_apply"):
            self._counted = count_steps_of(self.optimizer)

    def _stepper(self) -> Stepper | None:
        return self._counted or super()._stepper()

    def _build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
        make = getattr(inner, "_create_all_weights", None)  # of a legacy one of Keras 2
        if make is not None:
            make(variables)
        elif not getattr(optimizer, "built", getattr(optimizer, "_built", False)):
            optimizer.build(variables)

    def _array(self, variable: Any) -> Any:
        return tf.convert_to_tensor(variable)


__all__ = [
    "TensorFlowKerasState",
    "TensorFlowState",
]
__all__ += elastic.__all__
