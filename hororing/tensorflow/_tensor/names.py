"""Default names of requests for TensorFlow.

In eager mode calls are counted, as everywhere. While a graph is built, the name consists of the
graph's own name (that of the traced function) and a count within it. A retrace, which may happen at
different times on each rank, gives the same names.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from hororing._requests.names import default_name
from hororing._requests.process_sets import ProcessSet, check_member

_counts: WeakKeyDictionary[Any, Counter[tuple[str, int | None]]] = WeakKeyDictionary()
_lock = threading.Lock()


def request_name(verb: str, name: str | None, process_set: ProcessSet) -> str:
    """Return `name`, or the next default name of `verb`, if this rank may call it.

    NotInitializedError before `init`, ValueError outside of the process set.
    """
    members = check_member(process_set, verb)
    if name is not None:
        if not isinstance(name, str):
            raise TypeError(f"{verb}: name must be a str, not {type(name).__name__}")
        return name
    if tf.executing_eagerly():
        return default_name(verb, members)
    return in_graph(verb, members)


def unique_in_graph(name: str, process_set: ProcessSet) -> str:
    """Return `name`, with a number if the present graph already has a request of this name.

    For example, a persistent tape may compute the same gradients twice, and both may be in flight.
    """
    _, number = _count(name, check_member(process_set, name))
    return name if number == 1 else f"{name}.{number}"


def in_graph(what: str, process_set: int | None) -> str:
    """The next name for `what` of a process set in the graph that is being built.

    Each set has its own count, because not all ranks are members of all sets.
    """
    graph, number = _count(f"/{what}", process_set)
    # Names of branches and loop bodies end in numbers that differ between ranks.
    function = re.sub(r"(_\d+)+$", "", getattr(graph, "name", "graph"))
    return f"{function}/{what}.{number}"


def _count(what: str, process_set: int | None) -> tuple[tf.Graph, int]:
    graph = tf.compat.v1.get_default_graph()
    with _lock:
        count = _counts.setdefault(graph, Counter())
        count[what, process_set] += 1
        return graph, count[what, process_set]
