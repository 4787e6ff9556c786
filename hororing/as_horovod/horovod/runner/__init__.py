"""The package of `import horovod.runner`: `run` and everything except starting ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hororing
from hororing.as_horovod import finder


class _Function:
    """A function that may import horovod when it is unpickled, before it can install it."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self._func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._func(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (finder.InstallWhenUnpickled(), self._func)


def _unpickle(_: None, func: Callable[..., Any]) -> Callable[..., Any]:
    return func


def run(func: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Like `hororing.run`; ranks find hororing under Horovod's names, too."""
    return hororing.run(_Function(func) if callable(func) else func, *args, **kwargs)
