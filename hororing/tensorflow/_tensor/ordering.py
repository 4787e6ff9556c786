"""Puts the parts of a graph that send requests of one name in the order of the program.

A function is traced once, so each of its calls sends requests of the same names. Were two calls in
flight at once, one rank's first call might meet another rank's second. TensorFlow orders calls only
if one of them writes a resource that the other one uses, or if neither uses any. Therefore every
call, branch or loop waits for the one before it that has a name in common. Without a common name,
they run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final
from weakref import WeakKeyDictionary

import tensorflow as tf
from tensorflow.python.framework.auto_control_deps import register_acd_resource_resolver
from tensorflow.python.framework.ops import get_gradient_function

# The name of a request and its process set, which is None if only the running graph knows it.
_Key = tuple[bytes, int | None]

_SUBMIT: Final = "HororingSubmit"
_WAIT: Final = "HororingWait"
_CUSTOM_GRADIENT: Final = "IdentityN"

_function_attributes: dict[str, list[str]] = {}  # by type of operation
_keys_of_graphs: WeakKeyDictionary[Any, frozenset[_Key]] = WeakKeyDictionary()


class _Order:
    """What is in order in one graph. Names, because an operation would keep its graph alive."""

    def __init__(self) -> None:
        self.latest: dict[_Key, str] = {}  # the last operation that used each request
        self.seen: set[str] = set()  # graphs of gradients pass here twice


_orders: WeakKeyDictionary[Any, _Order] = WeakKeyDictionary()


@register_acd_resource_resolver  # type: ignore[untyped-decorator]
def hororing_requests_in_order(op: Any, reads: Any, writes: Any) -> bool:
    """Put `op` in order. TensorFlow calls this for each operation of a function that it has traced.

    Returns False: the resources of `op` remain as they are.
    """
    put_in_order(op)
    return False


def put_in_order(op: Any) -> None:
    """Let `op` start after the operations before it in its graph that use one of its names."""
    keys = _keys(op)
    if not keys:
        if op.type == _CUSTOM_GRADIENT:  # which may call functions
            _order_gradients(op)
        return
    order = _orders.setdefault(op.graph, _Order())
    if op.name in order.seen:
        return
    order.seen.add(op.name)
    if op.type != _WAIT:  # which needs its submissions anyway
        context = op._get_control_flow_context()
        names = {order.latest[key] for key in keys if key in order.latest}
        before = [op.graph.get_operation_by_name(name) for name in sorted(names)]
        op._add_control_inputs(
            [each for each in before if each._get_control_flow_context() is context]
        )
    if op.type != _SUBMIT:
        order.latest.update(dict.fromkeys(keys, op.name))
    if op.type not in (_SUBMIT, _WAIT):
        _order_gradients(op)


def _order_gradients(op: Any) -> None:
    """Put what computes the gradients of `op` in order: TensorFlow leaves out such graphs."""
    try:
        gradient = get_gradient_function(op)
    except LookupError:
        return
    if gradient is None or hasattr(gradient, "hororing_in_order"):
        return

    def in_order(op: Any, *upstream: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        count = len(graph.get_operations())
        results = gradient(op, *upstream)
        for each in graph.get_operations()[count:]:
            put_in_order(each)
        return results

    in_order.hororing_in_order = True  # type: ignore[attr-defined]
    op._gradient_function = in_order


def _keys(op: Any) -> frozenset[_Key]:
    """Return the requests that `op` sends or awaits, also those of functions that it calls."""
    if op.type == _SUBMIT:
        name, process_set = (tf.get_static_value(each) for each in op.inputs[1:3])
        return frozenset([(name.tobytes(), None if process_set is None else int(process_set))])
    if op.type == _WAIT:
        return _union(_keys(handle.op) for handle in op.inputs)
    if op.type not in _function_attributes:
        _function_attributes[op.type] = [
            each.name for each in op.op_def.attr if each.type in ("func", "list(func)")
        ]
    keys = []
    for attribute in _function_attributes[op.type]:
        value = op.get_attr(attribute)
        functions = value if isinstance(value, list) else [value]
        keys += [_keys_of(op.graph, function.name) for function in functions]
    return _union(keys)


def _keys_of(graph: Any, function: str) -> frozenset[_Key]:
    while graph is not None:
        called = getattr(graph._get_function(function), "graph", None)
        if called is None:
            graph = getattr(graph, "outer_graph", None)
            continue
        if called not in _keys_of_graphs:
            _keys_of_graphs[called] = _union(_keys(op) for op in called.get_operations())
        return _keys_of_graphs[called]
    return frozenset()


def _union(sets: Iterable[frozenset[_Key]]) -> frozenset[_Key]:
    return frozenset().union(*sets)
