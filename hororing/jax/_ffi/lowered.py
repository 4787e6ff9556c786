"""Lets each call of an inner function that communicates be lowered by itself.

JAX lowers an inner jitted function once, however often a program calls it, and so with equal loops,
branches and rematerialised functions. A request in it would have one name in several places, which
XLA runs in any order; it would meet a request of another place on another rank. So functions with
requests are not kept, and each place gets a name of its own (program.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
from jax.interpreters import mlir

# JAX has no option for it. Since 0.5 there is the first, and later the second one.
_CACHES: Final = ("cached_primitive_lowerings", "lowering_cache")
_requests = 0  # that were lowered in this process


def note_request(module_context: Any, verb: str) -> None:
    """Note that a request is being lowered. NotImplementedError if JAX may use it twice."""
    global _requests
    if not isinstance(getattr(module_context, _CACHES[0], None), _Functions):
        raise NotImplementedError(
            f"{verb}: hororing does not know how JAX {jax.__version__} lowers inner functions, and "
            "might confuse their requests; call it outside of jax.jit, or install a version of JAX "
            "or of hororing that fits"
        )
    _requests += 1


class _Functions(dict[Any, Any]):
    """JAX looks a function up, lowers it if it is missing, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[Any, int] = {}  # requests, when a function was missing

    def get(self, key: Any, default: Any = None) -> Any:
        found = super().get(key, default)
        if found is default:
            self._before[key] = _requests
        return found

    def __missing__(self, key: Any) -> Any:
        self._before[key] = _requests
        raise KeyError(key)

    def __setitem__(self, key: Any, function: Any) -> None:
        if self._before.pop(key, None) == _requests:
            super().__setitem__(key, function)


def _with_our_caches(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def make_with_ours(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        for name in _CACHES:
            if getattr(self, name, None) == {} and not isinstance(getattr(self, name), _Functions):
                setattr(self, name, _Functions())

    return make_with_ours


mlir.ModuleContext.__init__ = _with_our_caches(mlir.ModuleContext.__init__)
