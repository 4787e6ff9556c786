"""What happens for every tensor of every call, in C++ (csrc/python/module.cc)."""

from collections.abc import Callable
from typing import Any

class PlainTensors:
    """A framework's tensors that lie in host memory as they look, and requests for them."""

    def __new__(
        cls,
        types: tuple[type, ...],
        exchange: object,
        refusals: tuple[Callable[[Any], bool], ...],
        describe: Callable[[Any], tuple[int, int, tuple[int, ...]] | None],
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
        wait_follows: bool,
        /,
    ) -> int: ...
    def grouped_allreduce(
        self,
        tensors: tuple[Any, ...],
        name: str | None,
        process_set: int,
        op: int | None,
        prescale: float,
        postscale: float,
        wait_follows: bool,
        /,
    ) -> int: ...
    def finish(self, handle: int, /) -> Any: ...
