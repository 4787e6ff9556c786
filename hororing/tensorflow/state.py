"""Variables and objects from one rank to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from hororing._requests import arguments, objects
from hororing._requests.handles import BROADCAST
from hororing._requests.process_sets import ProcessSet, check_member, global_process_set
from hororing.tensorflow._tensor.requests import Request, carry_out
from hororing.tensorflow._tensor.tensors import checked_tensor
from hororing.tensorflow.gradients import step_prefix, unique_names


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Overwrite the variables of all ranks with those of rank `root_rank`.

    The result is None in eager mode and in a `tf.function`, and an operation in a graph of
    TensorFlow 1.

    Parameters
    ----------
    variables : iterable
        TensorFlow or Keras variables, in the same order on every rank, such as
        ``model.variables`` or ``optimizer.variables``; build both before.
    root_rank : int
        Counts among all ranks of the job, also within a process set.
    inplace : bool, optional
        Horovod's; variables are assigned either way, and nothing is copied twice.

    Examples
    --------
    >>> hvd.broadcast_variables(model.variables, root_rank=0)
    >>> hvd.broadcast_variables(optimizer.variables, root_rank=0)
    """
    assigned = _assigned("broadcast_variables", variables, root_rank, process_set)
    return tf.group(*assigned) if assigned else None


def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Like `broadcast_variables`; returns the variables.

    A graph of TensorFlow 1 runs only what a result depends on: there, the list holds the values
    after the broadcast.

    Raises
    ------
    ValueError : for reference variables of TensorFlow 1 beside resource variables.

    Examples
    --------
    >>> variables = hvd.broadcast_(model.variables, root_rank=0)
    """
    variables = arguments.check_variables(variables, "broadcast_")
    kinds = {
        isinstance(variable, tf.compat.v1.Variable) and variable.dtype._is_ref_dtype
        for variable in variables
    }
    if len(kinds) > 1:
        raise ValueError("broadcast_: reference and resource variables cannot be mixed")
    prefix = "broadcast_" if name is None else name
    return _assigned(prefix, variables, root_rank, process_set) or variables


def _assigned(
    prefix: str, variables: Iterable[Any], root_rank: int, process_set: ProcessSet
) -> list[Any]:
    """Return what assigns the variables; nothing where TensorFlow runs it without being asked."""
    check_member(process_set, prefix)
    root_rank = arguments.check_root(root_rank, prefix)
    variables = arguments.check_variables(variables, prefix)
    if not variables:
        return []
    names = unique_names(step_prefix(prefix, process_set), variables)
    values = [
        checked_tensor(variable, name) for variable, name in zip(variables, names, strict=True)
    ]
    results = carry_out(
        [
            Request(BROADCAST, name, [value], process_set, root=root_rank)
            for name, value in zip(names, values, strict=True)
        ]
    )
    assigned = [
        variable.assign(result) for variable, (result,) in zip(variables, results, strict=True)
    ]
    graph = tf.compat.v1.get_default_graph()
    return [] if tf.executing_eagerly() or graph._add_control_dependencies else assigned


def broadcast_global_variables(root_rank: int) -> Any:
    """Return the operation that broadcasts all global variables of a graph of TensorFlow 1.

    Raises
    ------
    RuntimeError : in eager mode, where variables are not registered anywhere.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables: there are no global variables in eager mode; use "
            "broadcast_variables(model.variables, root_rank), or BroadcastGlobalVariablesCallback "
            "with model.fit"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts all global variables when a session of TensorFlow 1 is created.

    Parameters
    ----------
    root_rank : int
        The rank whose values are sent.
    device : str, optional
        Accepted for Horovod's sake; no effect.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self._operation: Any = None
        self._graph: Any = None

    def begin(self) -> None:
        """Add the operation to the graph that is about to be used."""
        graph = tf.compat.v1.get_default_graph()
        if self._graph is not graph:
            self._graph, self._operation = graph, broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it."""
        if self._operation is not None:
            session.run(self._operation)


def _refuse_functions(verb: str) -> None:
    if tf.inside_function():
        raise RuntimeError(
            f"{verb}: call it outside of tf.function, which would run it during tracing: "
            "not in every call, and not at the same time on all ranks"
        )


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return, on every rank, the object that rank `root_rank` passes.

    Any object that cloudpickle can carry. `session` is Horovod's: no session is needed.

    >>> config = hvd.broadcast_object(config)
    """
    _refuse_functions("broadcast_object")
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that does as `broadcast_object` with its argument.

    >>> broadcast = hvd.broadcast_object_fn(root_rank=0)
    >>> settings = broadcast({"rate": 0.1})
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return a list of the objects of all ranks of the process set, in rank order.

    `session` is Horovod's: no session is needed.

    >>> hvd.allgather_object({"rank": hvd.rank()})  # on one rank
    [{'rank': 0}]
    """
    _refuse_functions("allgather_object")
    return objects.allgather_object(obj, name, process_set)


__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]
