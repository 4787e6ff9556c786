"""Persistent allreduces for gradient hooks: the same tensors in each step, many in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from hororing._engine.core import fail, ffi, lib
from hororing._requests.handles import (
    ALLREDUCE,
    HOST,
    WAIT_SLICE_S,
    View,
    abandon,
    block_until_complete,
    make_request,
    submit_count,
    submitting,
    wait_in_stream,
)
from hororing._requests.names import WORLD_SET
from hororing._tensors import Gradient

# The states of a gradient, as in csrc/python/gradients.cc.
ASK: Final = 0  # not computed; the hook asks `may_send`
READY: Final = 1  # not computed; the hook sends it
QUEUED: Final = 2  # computed, and to be sent
SENT: Final = 3  # in flight


class PersistentAllreduce(Gradient):
    """An in-place allreduce of one tensor, prepared once and started again and again.

    `start_many` starts, `wait_in` waits. At most one start may be in flight; `keep` holds the
    tensor meanwhile. A caller of `finish_many` resets `handle`.
    """

    __slots__ = ("_owners", "device", "request")

    def __init__(self, device: int) -> None:
        self.device = device
        self.request: Any = None

    def prepare(
        self, name: str, dtype: int, shape: Sequence[int], op: int, prescale: float = 1.0,
        postscale: float = 1.0, process_set: int = WORLD_SET,
    ) -> None:  # fmt: skip
        """Compute everything that all starts share."""
        self.request, self._owners = make_request(
            ALLREDUCE, name, [View(0, 0, dtype, tuple(shape), self.device)], process_set, op, 0,
            prescale, postscale, None,
        )  # fmt: skip
        self.address = int(ffi.cast("uintptr_t", self.request))

    def weigh(self, cell: Any) -> None:
        """Make it a weighted average; `cell`, of `new_weight`, has this rank's weight. None: plain.

        The caller keeps `cell` alive. It is read at each start.
        """
        if self.request is not None:
            self.request.weight = ffi.NULL if cell is None else cell

    @property
    def is_complete(self) -> bool:
        """Whether nothing is in flight, or `wait_in` returns at once."""
        return not self.handle or bool(lib.hr_poll(self.handle))

    def wait_in(self, stream: int = 0) -> Any:
        """Wait for the started request, if it is in flight; return its tensor.

        On a device, `stream` and the stream that computed the tensor wait for it.
        """
        handle, keep = self.handle, self.keep
        code = block_until_complete(handle) if handle else lib.HR_OK
        if handle and self.device != HOST and code == lib.HR_OK:
            try:
                for each in {stream, int(self.request.stream)}:
                    wait_in_stream(handle, each)
            except Exception:
                self.abandon()
                raise
        self.handle = 0
        self.keep = None
        if handle:
            lib.hr_release(handle)
        if code != lib.HR_OK:
            fail(code)
        return keep

    def abandon(self) -> None:
        """Forget the request in flight, if there is one."""
        if self.handle:
            abandon(self.handle, self.keep)
        self.handle = 0
        self.keep = None


def new_weight() -> Any:
    """Return memory for one weight, item 0, initially 0."""
    return ffi.new("double *")


def start_many(
    requests: Sequence[PersistentAllreduce], addresses: list[int], tensors: Sequence[object],
    in_flight: list[int],
) -> tuple[int, int]:  # fmt: skip
    """Start requests with `tensors` at `addresses`; return how many were started, and a code.

    If one is rejected, neither it nor any later one is in flight; `fail(code)` raises the reason.
    The handles of the others are added to `in_flight`.
    """
    count = len(addresses)
    c_handles = ffi.new("int64_t[]", count)
    token = next(submit_count)
    submitting[token] = tensors
    started = int(lib.hr_start([each.request for each in requests], addresses, count, c_handles))
    handles = ffi.unpack(c_handles, count)
    code = 0 if started == count else handles[started]
    del handles[started:]
    for each, tensor, handle in zip(requests, tensors, handles, strict=False):
        each.keep = tensor
        each.handle = each.latest = handle
        each.state = SENT
    in_flight += handles
    del submitting[token]
    return started, code


def finish_many(handles: list[int], stream: int | None = None) -> bool:
    """Wait for all handles and release them. False: some failed, and none is released.

    `stream`, of a device, waits for the results. May be called again.
    """
    c_handles, count = ffi.new("int64_t[]", handles), len(handles)
    c_stream = ffi.NULL if stream is None else ffi.new("uintptr_t *", stream)
    while True:
        code = int(lib.hr_wait_many(c_handles, count, WAIT_SLICE_S, c_stream))
        if code != lib.HR_PENDING:
            return code == lib.HR_OK
