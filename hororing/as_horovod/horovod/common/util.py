"""Horovod's small functions that scripts import, except for those about its build."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from hororing._api import built

T = TypeVar("T")

_cache = functools.cache


# ---------------------------------------------------------------------------------------------
# These work here


def _adapter_exists(framework: str) -> bool:
    try:
        return all(importlib.util.find_spec(name) for name in (framework, f"hororing.{framework}"))
    except ImportError:  # the adapter does not exist
        return False


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether hororing's adapter for "torch", "tensorflow" or "keras" works here."""
    return _report(_adapter_exists(ext_base_name), f"adapter for {ext_base_name}", verbose)


def check_extension(ext_name: str, *build: object) -> None:
    """Raise ImportError unless the adapter for a module ("horovod.torch") works here.

    `build`: how Horovod would be built with it, which does not matter here.
    """
    framework = ext_name.removeprefix("horovod.")
    if not _adapter_exists(framework):
        raise ImportError(
            f"{ext_name} does not work here: {framework} is not installed, or hororing has no "
            "adapter for it; see python -m hororing info"
        )


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework's tensors can be reduced in GPU memory."""
    available = _adapter_exists(ext_base_name) and (built.cuda_built() or built.rocm_built())
    return _report(available, f"GPU support for {ext_base_name}", verbose)


def mpi_built(verbose: bool = False) -> bool:
    """Whether hororing was built with MPI."""
    return _report(built.mpi_built(), "MPI", verbose)


def gloo_built(verbose: bool = False) -> bool:
    """Whether hororing was built with Gloo."""
    return _report(built.gloo_built(), "Gloo", verbose)


def nccl_built(verbose: bool = False) -> int:
    """Version of NCCL as a number, 0 without it."""
    version = built.nccl_built()
    _report(bool(version), "NCCL", verbose)
    return version


def ddl_built(verbose: bool = False) -> bool:
    """Whether hororing was built with DDL."""
    return _report(built.ddl_built(), "DDL", verbose)


def ccl_built(verbose: bool = False) -> bool:
    """Whether hororing was built with oneCCL."""
    return _report(built.ccl_built(), "oneCCL", verbose)


def _report(there: bool, what: str, verbose: bool) -> bool:
    if verbose:
        print(f"{what}: {'yes' if there else 'no'}")
    return there


# ---------------------------------------------------------------------------------------------
# Odds and ends


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables inside the context; None removes one."""
    before = {name: os.environ.get(name) for name in kwargs}
    _set_environment(kwargs)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741  Horovod's name
    """Cut into `n` pieces in order; the first ones may have one item more."""
    least, longer = divmod(len(l), n)
    ends = [least * i + min(i, longer) for i in range(n + 1)]
    return [l[begin:end] for begin, end in itertools.pairwise(ends)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether it is 1, 2, 4, 8, ..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(x: object) -> bool:
    """Whether `iter(x)` works."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Compare version texts; `target` has three parts. The rest of `ver` after them is cut off.

    ValueError if one is not a text, or has another form.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"versions must be texts, not {ver!r} and {target!r}")
    wanted = target.split(".")
    if len(wanted) != 3 or not all(part.isdecimal() for part in wanted):
        raise ValueError(f"target version {target!r} must be three numbers, such as 2.1.0")
    return _numbers(ver) >= [int(part) for part in wanted]


def _numbers(version: str) -> list[int]:
    """Return the first three numbers of "2.13.0+cpu" or "2.1rc1"."""
    numbers = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = len(part) - len(part.lstrip("0123456789"))
        if not digits:
            raise ValueError(f"version {version!r} does not begin with numbers")
        numbers.append(int(part[:digits]))
    return numbers + [0] * (3 - len(numbers))


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """Make a function of (op, average) that returns the operation from `reduce_ops`.

    It raises ValueError if both are given; neither means Average.
    """

    def choose(op: Any, average: bool | None) -> Any:
        if average is None:
            return reduce_ops.Average if op is None else op
        if op is not None:
            raise ValueError("op and average exclude each other; use op")
        warnings.warn("average= is deprecated; use op=", DeprecationWarning, stacklevel=3)
        return reduce_ops.Average if average else reduce_ops.Sum

    return choose
