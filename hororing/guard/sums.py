"""Sums of gradients that are not finite, as the engine has found them (engine/finite_watch.h).

It looks at sums where it computes them. Which of them are not finite is the same on all ranks. What
is known of the gradients is spread over ranks: each has looked at some parts of some of them, so
they tell one another (`by_rank`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from hororing._engine.core import ffi, lib

_KEPT: Final = 4096  # names
_TEXT: Final = 1 << 16  # bytes of a note

_watchers = 0
_held: dict[tuple[int, str], Found] = {}  # by process set and name


class Part(NamedTuple):
    """So many elements of a rank's gradient."""

    rank: int
    nan: int
    infinite: int


class Found(NamedTuple):
    """What the engine knows of a sum that is not finite."""

    size: int
    parts: list[Part]


class Note(NamedTuple):
    """A gradient that is not finite, on a rank: see `NonFinite`."""

    name: str
    value: str
    elements: int
    size: int
    finite_above: str | None


class Sum(NamedTuple):
    """A sum that is not finite, and what this rank knows of it."""

    name: str
    size: int
    order: int  # of this rank's backward pass, or in which they were found
    finite_above: str | None
    parts: Sequence[Part]


def watch(on: bool) -> None:
    """Start to look at sums, or stop; it goes on while another has not stopped."""
    global _watchers
    _watchers += 1 if on else -1
    _drain()


def _drain() -> None:
    text = ffi.new("char[]", _TEXT)
    while lib.hr_take_nonfinite(_watchers, text, _TEXT):
        number, rank, nan, infinite, name = ffi.string(text).decode().split(" ", 4)
        part = Part(int(rank), int(nan), int(infinite))
        found = _held.setdefault((int(number), name), Found(part.nan, []))
        if part.rank >= 0:  # else it is the first note of this sum
            found.parts.append(part)
        if len(_held) > _KEPT:
            del _held[next(iter(_held))]


def take(process_set: int, names: Iterable[str] | None = None) -> dict[str, Found]:
    """Return the sums of these names that were not finite, and forget them. None: of all names."""
    _drain()
    if not _held:
        return {}
    if names is None:
        names = [name for number, name in _held if number == process_set]
    return {name: _held.pop((process_set, name)) for name in names if (process_set, name) in _held}


def all_of(process_set: int, members: Callable[[str], Sequence[str]]) -> list[Sum]:
    """Return all sums that were not finite, in the order in which they were found.

    `members` returns the names of the tensors in a request, given its name.
    """
    result = []
    for at, (name, found) in enumerate(take(process_set).items()):
        request, _, place = name.rpartition("_")  # "request_2of7"
        number, _, count = place.partition("of")
        if number.isdigit() and count.isdigit() and int(count) == len(members(request)):
            name = members(request)[int(number) - 1]
        else:
            name = members(name)[0]
        result.append(Sum(name, found.size, at, None, found.parts))
    return result


def by_rank(told: Mapping[int, Sequence[Any]]) -> dict[int, list[Note]]:
    """Return the gradients that are not finite, in order of backward, of what all ranks tell."""
    totals: dict[tuple[int, str], list[int]] = {}
    for sums in told.values():
        for name, _, _, _, parts in sums:
            for rank, nan, infinite in parts:
                total = totals.setdefault((rank, name), [0, 0])
                total[0] += nan
                total[1] += infinite
    found: dict[int, list[Note]] = {}
    for rank, sums in told.items():
        for name, size, _, above, _ in sorted(sums, key=lambda each: each[2]):
            nan, infinite = totals.get((rank, name), (0, 0))
            if nan + infinite:
                value = "NaN" if nan else "infinite"
                found.setdefault(rank, []).append(Note(name, value, nan + infinite, size, above))
    return found
