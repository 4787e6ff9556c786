"""The mark `ranks` of a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

HELP = (
    "ranks(*sizes, backend='hororing', limit_s=None, init=True, elastic=False): run the test on "
    "that many ranks at once; several numbers make several tests (docs/testing_your_code.md)"
)
INTERLEAVE_HELP = (
    "interleave(seeds=20, max_ms=5.0): run the test on ranks once for each seed, with random "
    "delays before its collectives"
)
SEED = "interleave"  # the parameter of tests with that mark
SIZE = "ranks"  # the parameter of tests with several numbers
_MOST_RANKS = 64


@dataclass(frozen=True)
class Wish:
    """The arguments of the mark."""

    sizes: tuple[int, ...]
    backend: str
    limit_s: float | None
    init: bool
    elastic: bool


_DEFAULTS = {"backend": "", "limit_s": None, "init": True, "elastic": False}


def wish_of(mark: pytest.Mark) -> Wish:
    """Return the arguments of a mark. They fail the test, or its collection, if they are wrong."""
    problem = ""
    given = {**_DEFAULTS, **mark.kwargs}
    if unknown := set(mark.kwargs) - {*_DEFAULTS}:
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
    elif wrong := [name for name in ("init", "elastic") if type(given[name]) is not bool]:
        problem = f"{wrong[0]}={given[wrong[0]]!r} is not True or False"
    elif given["elastic"] and given["backend"] == "gloo":
        problem = "gloo has no elastic jobs"
    if problem:
        pytest.fail(f"pytest.mark.ranks: {problem}", pytrace=False)
    return Wish(mark.args, given["backend"], given["limit_s"], given["init"], given["elastic"])


def wish_for(item: pytest.Item) -> Wish:
    """Return what a test wishes. pytest.fail.Exception: it is wrong, or cannot be."""
    mark = item.get_closest_marker("ranks")
    assert mark is not None
    wish, parameters = wish_of(mark), _parameters(item)
    several = [("ranks", SIZE)] if len(wish.sizes) > 1 else []
    several += [("interleave", SEED)] if item.get_closest_marker("interleave") else []
    for name, parameter in several:
        if parameter not in parameters:
            pytest.fail(
                f"pytest.mark.{name}: pytest does not repeat a method of unittest.TestCase: write "
                "a function or a plain class, or ranks(2) with one number",
                pytrace=False,
            )
    return wish


def _parameters(item: pytest.Item) -> dict[str, Any]:
    chosen = getattr(item, "callspec", None)  # methods of unittest.TestCase have none
    return dict(chosen.params) if chosen is not None else {}


def _is_limit(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9


def size_of(item: pytest.Item) -> int:
    """Return the number of ranks of a test; 0: it has no mark."""
    mark = item.get_closest_marker("ranks")
    if mark is None:
        return 0
    found = _parameters(item).get(SIZE, mark.args[0] if mark.args else 1)
    return found if type(found) is int and found > 0 else 1  # `wish_for` refuses others


def interleave(seeds: Any, max_ms: Any) -> pytest.MarkDecorator:
    """See `faults.interleave`."""
    return pytest.mark.interleave(seeds=seeds, max_ms=max_ms)


def seeds_of(mark: pytest.Mark) -> list[int]:
    """Return the seeds of a mark `interleave`. A wrong argument fails the collection."""
    seeds, max_ms = _interleave_arguments(mark)
    if type(seeds) is int and seeds > 0:
        return list(range(seeds))
    found = [] if isinstance(seeds, (int, str)) else list(seeds)
    if not found or not all(type(each) is int for each in found):
        pytest.fail(f"interleave: seeds={seeds!r} is neither a number nor a list of numbers", False)
    if not _is_limit(max_ms):
        pytest.fail(f"interleave: max_ms={max_ms!r} is not a number of ms above 0", False)
    return found


def _interleave_arguments(mark: pytest.Mark) -> tuple[Any, Any]:
    names = ("seeds", "max_ms")
    given = {"seeds": 20, "max_ms": 5.0, **dict(zip(names, mark.args, strict=False)), **mark.kwargs}
    if len(mark.args) > 2 or set(given) != set(names):
        pytest.fail(f"interleave: {INTERLEAVE_HELP}", False)
    return given["seeds"], given["max_ms"]


def delays_of(item: pytest.Item) -> tuple[int, float] | None:
    """Return the seed of a test and its longest delay in s; None: it has no mark `interleave`."""
    mark = item.get_closest_marker("interleave")
    seed = _parameters(item).get(SEED)
    if mark is None or seed is None:
        return None
    return seed, _interleave_arguments(mark)[1] / 1000
