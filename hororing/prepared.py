"""The path of gradient hooks: allreduces of the same tensors, again and again, many in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hororing._core import ffi, lib
from hororing._tensors import Prepared
from hororing.collectives import (
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
from hororing.failures import fail
from hororing.names import WORLD_SET


class PreparedAllreduce(Prepared):
    """An in-place allreduce of one tensor, again and again: all that can be is computed once.

    `start_many` submits, `finish` waits. At most one start may be in flight; `keep` holds the
    tensor meanwhile. Who has waited by `finish_many` resets `handle`.
    """

    __slots__ = ("_owners", "on_device", "request")

    def __init__(
        self,
        name: str,
        dtype: int,
        shape: Sequence[int],
        op: int,
        prescale: float,
        postscale: float,
        process_set: int = WORLD_SET,
        device: int = HOST,
    ) -> None:
        view = View(0, 0, dtype, tuple(shape), device)
        self.on_device = device != HOST
        self.request, self._owners = make_request(
            ALLREDUCE, name, [view], process_set, op, 0, prescale, postscale, None
        )
        self.address = int(ffi.cast("uintptr_t", self.request))

    def finish(self, stream: int = 0) -> Any:
        """Wait for what was started, if it is in flight; return what has held it.

        On a device that is `stream` that waits, and the one that it was computed in.
        """
        handle, keep = self.handle, self.keep
        code = block_until_complete(handle) if handle else lib.HR_OK
        if handle and self.on_device and code == lib.HR_OK:
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
        """Forget what is in flight, if anything is."""
        if self.handle:
            abandon(self.handle, self.keep)
            self.handle = 0
            self.keep = None


def start_many(
    prepared: Sequence[PreparedAllreduce], addresses: list[int], keeps: Sequence[object],
    flying: list[int],
) -> tuple[int, int]:  # fmt: skip
    """Submit tensors at `addresses`, which `keeps` own; return how many were, and a code.

    If one is refused, it and those after it are not in flight; `fail(code)` tells why. The handles
    of the others are added to `flying`.
    """
    count = len(addresses)
    c_handles = ffi.new("int64_t[]", count)
    requests = [each.request for each in prepared]
    token = next(submit_count)
    submitting[token] = keeps
    started = int(lib.hr_start(requests, addresses, count, c_handles))
    handles = ffi.unpack(c_handles, count)
    code = 0 if started == count else handles[started]
    del handles[started:]
    for each, keep, handle in zip(prepared, keeps, handles, strict=False):
        each.keep = keep
        each.handle = handle
    flying += handles
    del submitting[token]
    return started, code


def finish_many(handles: list[int], stream: int | None = None) -> bool:
    """Wait for all handles and release them. False: some failed, and none is released.

    `stream`, of a device, waits for the results there. May be called again.
    """
    c_handles, count = ffi.new("int64_t[]", handles), len(handles)
    while True:
        if stream is None:
            code = int(lib.hr_wait_many(c_handles, count, WAIT_SLICE_S))
        else:
            code = int(lib.hr_wait_many_in_stream(c_handles, count, WAIT_SLICE_S, stream))
        if code != lib.HR_PENDING:
            return code == lib.HR_OK
