"""`Call`: the arguments of a verb besides its arrays."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from hororing._requests.arguments import Average
from hororing._requests.process_sets import ProcessSet, global_process_set


class Call(NamedTuple):
    """Hashable, because it is a parameter of a primitive."""

    collective: int  # one of handles.ALLREDUCE, ...
    verb: str
    name: str | None
    site: str  # "function" or "function at file:line" of the caller
    process_set: ProcessSet = global_process_set
    op: int = Average
    factors: tuple[float, float] = (1.0, 1.0)  # prescale, postscale
    root: int = 0
    splits: tuple[int, ...] | None = None  # of an alltoall
    weight: float | None = None  # of a weighted average, if it is not an array
    # Of an allgather: the rows of all ranks together, shared as a reducescatter does; else equally.
    rows: tuple[int, ...] | None = None

    def backward(self, **changes: Any) -> Call:
        """Return the call for the gradients."""
        name = None if self.name is None else f"{self.name}.grad"
        verb = f"{self.verb}.grad"
        return self._replace(name=name, verb=verb, weight=None, rows=None, **changes)


_NOT_SCRIPTS = ("hororing", "jax", "optax", "flax", "contextlib", "functools")


def call_site() -> str:
    """The function that calls a verb, and where: of the script, not of a framework."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_SCRIPTS:
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_name} at {code.co_filename}:{frame.f_lineno}"
