"""The mark `ranks` of a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

HELP = (
    "ranks(*sizes, backend='hororing', limit_s=None, init=True): run the test on that many ranks, "
    "at once; on each of several numbers, one after the other (docs/testing_your_code.md)"
)
SIZE = "ranks"  # the parameter of tests with several numbers
_MOST_RANKS = 64


@dataclass(frozen=True)
class Wish:
    """The arguments of the mark."""

    sizes: tuple[int, ...]
    backend: str
    limit_s: float | None
    init: bool


def wish_of(mark: pytest.Mark) -> Wish:
    """Return the arguments of a mark. They fail the test, or its collection, if they are wrong."""
    problem = ""
    given = {"backend": "", "limit_s": None, "init": True, **mark.kwargs}
    if unknown := set(mark.kwargs) - {"backend", "limit_s", "init"}:
        problem = f"there is no argument {min(unknown)!r}: {HELP}"
    elif not mark.args:
        problem = "how many ranks? Write ranks(2)"
    elif not all(type(each) is int and 0 < each <= _MOST_RANKS for each in mark.args):
        problem = f"{mark.args}: numbers of ranks are whole numbers from 1 to {_MOST_RANKS}"
    elif len(set(mark.args)) < len(mark.args):
        problem = f"{mark.args}: a number is there twice"
    elif given["backend"] not in ("", "hororing", "gloo"):
        problem = f"backend={given['backend']!r}: there are 'hororing' and 'gloo'"
    elif given["limit_s"] is not None and not _is_limit(given["limit_s"]):
        problem = f"limit_s={given['limit_s']!r} is not a number of seconds above 0"
    elif type(given["init"]) is not bool:
        problem = f"init={given['init']!r} is not True or False"
    if problem:
        pytest.fail(f"pytest.mark.ranks: {problem}", pytrace=False)
    return Wish(mark.args, given["backend"], given["limit_s"], given["init"])


def _is_limit(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9


def size_of(item: pytest.Item) -> int:
    """Return the number of ranks of a test; 0: it has no mark."""
    mark = item.get_closest_marker("ranks")
    if mark is None:
        return 0
    chosen = getattr(item, "callspec", None)
    return int(chosen.params[SIZE] if chosen and SIZE in chosen.params else mark.args[0])
