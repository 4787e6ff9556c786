"""Names for the calls that callbacks of futures make.

Callbacks of different futures run in an order, and on threads, that differ between ranks. So calls
in a callback are not numbered with the others: they are named after the call whose future runs it.
`then` may run a callback at once, and torch makes the futures that `then` returns, without using a
class of ours. So we wrap the methods of torch's class: a callback is marked while it runs if its
future comes from a call of a process group.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, MutableMapping
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

_Future: Any = torch._C.Future


class Scope:
    """Names derived from one future: of its callbacks, and of the calls in its own callback.

    Parameters
    ----------
    group : ProcessGroup
        The call's group.
    name : str
        Such as "group1.7", or "group1.7.then1" for its first callback.
    """

    def __init__(self, group: Any, name: str) -> None:
        self.group: Final = group
        self._name = name
        self._callbacks = itertools.count(1)
        self._calls = itertools.count(1)

    def next_call(self) -> str:
        """Return the name of the next call in the callback."""
        return f"{self._name}.{next(self._calls)}"

    def next_callback(self) -> Scope:
        """Return the name of the next callback, and of its future."""
        return Scope(self.group, f"{self._name}.then{next(self._callbacks)}")

    def run(self, callback: Callable[[Any], Any], done: Any) -> Any:
        """Call `callback(done)`; calls in it are named after it."""
        before, _thread.scope = _thread.scope, self
        try:
            return callback(done)
        finally:
            _thread.scope = before


class _Thread(threading.local):
    scope: Scope | None = None


_thread: Final = _Thread()
_scopes: Final[MutableMapping[Any, Scope]] = WeakKeyDictionary()


def current(group: Any) -> Scope | None:
    """Return the scope of the callback that this thread runs, if its call is of `group`."""
    scope = _thread.scope
    return scope if scope is not None and scope.group is group else None


def name(future: Any, group: Any, call: str) -> None:
    """Name the calls in callbacks of `future` after `call`."""
    _scopes[future] = Scope(group, call)


def _mark(method: str) -> None:
    add = getattr(_Future, method)

    @functools.wraps(add)
    def marked(self: Any, callback: Callable[[Any], Any]) -> Any:
        scope = _scopes.get(self)
        if scope is None:
            return add(self, callback)
        inner = scope.next_callback()
        future = add(self, functools.partial(inner.run, callback))
        if future is not None:
            _scopes[future] = inner
        return future

    setattr(_Future, method, marked)


_mark("then")
_mark("add_done_callback")
