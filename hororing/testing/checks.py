"""Checks for tests on ranks: what must be the same everywhere, and who must raise."""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

__all__ = ["assert_same", "raises_on"]
_NAME: Final = "hororing.testing.assert_same"


def assert_same(value: Any) -> None:
    """Fail on every rank unless `value` is the same on all of them, to the bit.

    Blocks until all ranks have called it.

    Parameters
    ----------
    value : tensor, array, float, str, dict, list or tuple
        Or any nesting of these; for example a gradient, or the ``state_dict()`` of a model.

    Raises
    ------
    AssertionError
        It names the ranks that differ from most ranks (from rank 0, if there is no majority), the
        first element that differs, both values, and how many elements differ.
    ValueError
        Neither hororing nor torch.distributed is initialised.

    Examples
    --------
    >>> import hororing.testing
    >>> hororing.testing.assert_same({"loss": 0.5})
    """
    __tracebackhide__ = True
    leaves = dict(_leaves(value, ""))
    described = {path: _describe(leaf) for path, leaf in leaves.items()}
    everyone = gather(described)
    problems = []
    for path in dict.fromkeys(path for each in everyone for path in each):
        found = [each.get(path, ("missing", "", "")) for each in everyone]
        usual = max(Counter(found).items(), key=lambda pair: pair[1])[0]
        others = [rank for rank, each in enumerate(found) if each != usual]
        if others:
            problems.append((path, found.index(usual), others[0], others, found))
    if not problems:
        return
    path, one, other, others, found = problems[0]
    text = f"{_ranks(others)} {'differs' if len(others) == 1 else 'differ'} from rank {one}"
    text += f" in {path}" if path else ""
    if found[one][:2] == found[other][:2]:
        arrays = gather(_array(leaves[path]) if rank_and_size()[0] in (one, other) else None)
        text += _difference(arrays[one], arrays[other], one, other)
    else:
        text += f": {' '.join(found[other][:2])} instead of {' '.join(found[one][:2])}"
    if len(problems) > 1:
        text += f"; so do {len(problems) - 1} more: {', '.join(each[0] for each in problems[1:6])}"
    raise AssertionError(text)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for at, each in enumerate(value):
            yield from _leaves(each, f"{path}[{at}]")
    else:
        yield path, value


def _describe(leaf: Any) -> tuple[str, str, str]:
    """Type, shape, and a digest of the bits."""
    array = _array(leaf)
    kind = str(getattr(leaf, "dtype", None) or type(leaf).__name__).rpartition(".")[2]
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return kind, str(tuple(array.shape)) if hasattr(leaf, "shape") else "", digest


def _array(leaf: Any) -> np.ndarray[Any, Any]:
    """The leaf as an array. Types that NumPy does not have become their bits, or exact floats."""
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu()
        if leaf.is_sparse:
            leaf = leaf.to_dense()
        if str(leaf.dtype) in ("torch.bfloat16", "torch.float8_e4m3fn", "torch.float8_e5m2"):
            leaf = leaf.float()
    elif hasattr(leaf, "numpy") and not isinstance(leaf, np.ndarray):
        leaf = leaf.numpy()
    array = np.asarray(leaf)
    return array if array.dtype != object else np.array(repr(leaf))


def _difference(one: Any, other: Any, first: int, second: int) -> str:
    """Where two arrays of the same type and shape differ."""
    flat, its = one.reshape(-1), other.reshape(-1)
    raw = [np.ascontiguousarray(each).view(np.uint8).reshape(max(len(each), 1), -1)
           for each in (flat, its)]  # fmt: skip
    if raw[0].shape != raw[1].shape:  # texts of different lengths
        return f": {its[0]!s} instead of {flat[0]!s}"
    wrong = np.flatnonzero((raw[0] != raw[1]).any(axis=1))
    at = int(wrong[0])
    where = tuple(int(each) for each in np.unravel_index(at, one.shape))
    a, b = flat[at], its[at]
    text = f" element {where}" if where else ""
    text = f"{text}: rank {second} has {b!s}, rank {first} has {a!s}"
    if np.issubdtype(one.dtype, np.number) and not np.issubdtype(one.dtype, np.bool_):
        text += f" (difference {_minus(b, a)})"
    return text + (f"; {len(wrong)} of {flat.size} elements differ" if flat.size > 1 else "")


def _minus(a: Any, b: Any) -> str:
    wide = complex if isinstance(a, np.complexfloating) else float
    exact = int if isinstance(a, np.integer) else wide
    return f"{exact(a) - exact(b):.3g}" if exact is not int else str(exact(a) - exact(b))


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class Raised:
    """The exception that a block has raised on this rank, as `value`; None on other ranks."""

    value: BaseException | None = None


@contextlib.contextmanager
def raises_on(
    ranks: int | Iterable[int],
    kind: type[BaseException] | tuple[type[BaseException], ...],
    match: str = "",
) -> Iterator[Raised]:
    """Expect an exception in the block on some ranks, and none on the others.

    Never communicates.

    Parameters
    ----------
    ranks : int or iterable of int
        The ranks that must raise.
    kind : type or tuple of type
        What they must raise.
    match : str, optional
        A regular expression that must be found in the text of the exception.

    Yields
    ------
    Raised
        Its `value` is the exception after the block.

    Raises
    ------
    AssertionError
        A rank of `ranks` did not raise, or with another text.

    Examples
    --------
    >>> import hororing.testing
    >>> with hororing.testing.raises_on(0, ZeroDivisionError):
    ...     1 / hvd.rank()
    """
    __tracebackhide__ = True
    mine, size = rank_and_size()
    wanted = {ranks} if isinstance(ranks, int) else set(ranks)
    if wrong := sorted(each for each in wanted if not 0 <= each < size):
        raise ValueError(f"raises_on: there is no rank {wrong[0]} among {size}")
    raised = Raised()
    if mine not in wanted:
        yield raised
        return
    names = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
    try:
        yield raised
    except kind as error:
        if re.search(match, str(error)) is None:
            raise AssertionError(
                f"rank {mine} raised {type(error).__name__}: {error}, without {match!r}"
            ) from error
        raised.value = error
    else:
        raise AssertionError(f"rank {mine} did not raise {names}")


# ---------------------------------------------------------------------------------------------
# Whatever is initialised


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks. ValueError if nothing is initialised."""
    state = sys.modules.get("hororing._engine.state")
    if state is not None and state.is_initialized():
        return state.rank(), state.size()
    dist = _initialized_torch()
    return dist.get_rank(), dist.get_world_size()


def gather(value: object) -> list[Any]:
    """Return the values of all ranks. Blocks until they have called it."""
    state = sys.modules.get("hororing._engine.state")
    if state is not None and state.is_initialized():
        from hororing._requests.objects import allgather_object

        return list(allgather_object(value, name=_NAME))
    dist = _initialized_torch()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _initialized_torch() -> Any:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        raise ValueError("neither hororing nor torch.distributed is initialised on this rank")
    return dist
