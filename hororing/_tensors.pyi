"""The work for every tensor of every call, in C++ (csrc/python/module.cc)."""

from collections.abc import Callable
from typing import Any

class PlainTensors:
    """A framework's tensors that lie in host memory as they look, and requests for them."""

    def __new__(
        cls,
        types: tuple[type, ...],
        exchange: object,
        refusals: tuple[Callable[[Any], bool], ...],
        describe: Callable[[Any], tuple[int, int, tuple[int, ...]] | None] | str,
        pending: dict[int, object],
        general: type,
        abandoned: dict[int, object],
        sweep: Callable[[], None],
        /,
    ) -> PlainTensors: ...
    def allreduce(
        self,
        tensor: object,
        output: object,
        keep: object,
        name: str | None,
        process_set: int,
        op: int | None,
        prescale: float,
        postscale: float,
        blocking: bool,
        /,
    ) -> Any: ...
    def grouped_allreduce(
        self,
        tensors: tuple[Any, ...],
        name: str | None,
        process_set: int,
        op: int | None,
        prescale: float,
        postscale: float,
        blocking: bool,
        /,
    ) -> Any: ...
    def finish(self, handle: int, /) -> Any: ...
    def send_gradients(
        self, gradients: list[Any], in_flight: list[int], failures: list[Exception], /
    ) -> None: ...

class Queue:
    """The gradients of one optimizer that are to be sent. Subclasses have `send_queued()`."""

    queued: list[Any]
    bytes_left: int
    thread: int

class Gradient:
    """One parameter's gradient, and the request that reduces it.

    Subclasses have `may_send()`, `share_of(param)`, `send_alone(grad, failures)` and
    `failure(code)`, for all that is rare.
    """

    step: Any
    param: Any
    keep: Any
    address: int
    handle: int
    latest: int
    share: int
    state: int
    simple: bool
    def on_gradient(self, param: Any, /) -> None: ...

def finish_gradients(entries: list[Any], state: int, /) -> list[Any]: ...
