"""Names of requests, by which ranks match them.

Names are scoped by process set. A call without a name gets one made from the number of such calls
so far, which is equal on all ranks that make the same calls.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Final

from hororing._engine import state
from hororing._engine.core import lib

# The process set of all ranks. Here sets are numbers; _requests.process_sets explains them.
WORLD_SET: Final = int(lib.HR_WORLD_SET)

# `default_name` counts these as well as verbs.
OPTIMIZER: Final = "optimizer"

Counts = dict[tuple[str, int], int]

# The number of unnamed calls of a verb in a process set.
counts: Final[Counts] = {}
_lock: Final = threading.RLock()  # a finalizer may call a verb in the middle of anything


class DefaultName(str):
    """A counted name."""

    __slots__ = ("counter", "number", "submitted")

    counter: tuple[str, int]  # of `counts`
    number: int
    submitted: bool  # other ranks may know it


def default_name(verb: str, process_set: int = WORLD_SET) -> DefaultName:
    """The next name of an unnamed `verb`: equal on ranks that make the same number of such calls.

    Each process set has its own count, because only its members call. Calls that fail on this rank
    alone do not count: see `naming`.
    """
    with _lock:
        number = counts.get((verb, process_set), 0) + 1
        counts[verb, process_set] = number
    name = DefaultName(f"{verb}.noname.{number}")
    name.counter, name.number, name.submitted = (verb, process_set), number, False
    return name


class naming:  # noqa: N801 (a verb, like contextlib's)
    """The name of a call: ``with naming(name, verb, process_set) as given:`` submit it.

    None becomes the default name, which is uncounted if the block ends without `note_submitted`:
    other ranks cannot know it.
    """

    __slots__ = ("given",)

    def __init__(self, name: str | None, verb: str = "", process_set: int = WORLD_SET) -> None:
        self.given = default_name(verb, process_set) if name is None else name

    def __enter__(self) -> str:
        return self.given

    def __exit__(self, *how: object) -> None:
        uncount(self.given)


def note_submitted(name: str) -> None:
    """Note that other ranks may know a name."""
    if isinstance(name, DefaultName):
        name.submitted = True


def uncount(name: str) -> None:
    """Uncount a default name whose call was not submitted."""
    if isinstance(name, DefaultName) and not name.submitted:
        with _lock:
            if counts.get(name.counter) == name.number:
                counts[name.counter] -= 1


def forget_counts(which: Callable[[str, int], bool]) -> None:
    """Count from 1 again where `which(verb, process set)` is true."""
    with _lock:
        for counter in [counter for counter in counts if which(*counter)]:
            del counts[counter]


def optimizers() -> Counts:
    """How many optimizers have got a default name so far, by process set."""
    with _lock:
        return {counter: count for counter, count in counts.items() if counter[0] == OPTIMIZER}


def restart_optimizers(known: Counts) -> None:
    """Restore the counts that `optimizers` has returned."""
    forget_counts(lambda verb, _: verb == OPTIMIZER)
    with _lock:
        counts.update(known)


def restart_default_names() -> None:
    """Count from 1 again: ranks that start together begin with equal counts."""
    with _lock:
        counts.clear()


state.at_init(restart_default_names)


def without_numbers(name: str) -> str:
    """Return a variable's name without the numbers that Keras gives layers.

    They also are within names of an optimizer's variables (``adam/dense_1_kernel_velocity``), and
    differ if a rank has made more layers, for example by loading a model.
    """
    return re.sub(r"_\d+(?=[_/]|$)", "", name)


def encode_name(name: str) -> bytes:
    """Return the name as the core's bytes."""
    check_name(name)
    if "\0" in name:
        raise ValueError(f"name {name!r} holds a zero character")
    return name.encode("utf-8", "backslashreplace")


def check_name(name: object) -> None:
    """Raise TypeError unless it is a text."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, not {type(name).__name__}")
