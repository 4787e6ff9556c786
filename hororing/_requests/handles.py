"""The common part of all framework adapters: requests, handles and waiting.

Framework-neutral: a tensor is a `View` (addresses, data type number, shape). The adapters turn
their arrays into views and keep nothing else of this; `hororing._requests.verbs` builds the public
functions on top.

Memory: the core borrows the memory of a view until its handle is complete. The owner of that memory
is kept alive here, beside the handle, and never by the core, which must not touch a Python object.

Callable from any thread. Only `wait` blocks, in slices, so that Ctrl-C works.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from hororing._engine.core import check, fail, ffi, lib
from hororing._job import threads
from hororing._requests.arguments import Sum
from hororing._requests.names import WORLD_SET, encode_name, note_submitted
from hororing._tensors import PlainTensors

# Data types that can be reduced, by the name that NumPy, torch and TensorFlow share.
REDUCED: Final[dict[str, int]] = {
    "uint8": lib.HR_UINT8,
    "int8": lib.HR_INT8,
    "uint16": lib.HR_UINT16,
    "int16": lib.HR_INT16,
    "int32": lib.HR_INT32,
    "int64": lib.HR_INT64,
    "float16": lib.HR_FLOAT16,
    "float32": lib.HR_FLOAT32,
    "float64": lib.HR_FLOAT64,
    "bool": lib.HR_BOOL,
    "bfloat16": lib.HR_BFLOAT16,
}
# All data types.
DTYPES: Final[dict[str, int]] = REDUCED | {
    "uint32": lib.HR_UINT32,
    "uint64": lib.HR_UINT64,
    "float8_e4m3fn": lib.HR_FLOAT8_E4M3FN,
    "float8_e5m2": lib.HR_FLOAT8_E5M2,
    "float8_e4m3fnuz": lib.HR_FLOAT8_E4M3FNUZ,
    "float8_e5m2fnuz": lib.HR_FLOAT8_E5M2FNUZ,
    "float8_e8m0fnu": lib.HR_FLOAT8_E8M0FNU,
    "float4_e2m1fn_x2": lib.HR_FLOAT4_E2M1FN_X2,
    "int4": lib.HR_INT4,
    "uint4": lib.HR_UINT4,
}

ALLREDUCE: Final = int(lib.HR_ALLREDUCE)
ALLGATHER: Final = int(lib.HR_ALLGATHER)
BROADCAST: Final = int(lib.HR_BROADCAST)
ALLTOALL: Final = int(lib.HR_ALLTOALL)
REDUCESCATTER: Final = int(lib.HR_REDUCESCATTER)

T = TypeVar("T")

# Seconds between two checks for Python's signals while waiting.
WAIT_SLICE_S: Final = 0.2


HOST: Final = -1  # the device number of host memory


class View(NamedTuple):
    """One tensor of a request: contiguous memory that the caller owns."""

    input: int  # address; 0 only without elements
    output: int  # address, may equal `input`; 0 if the core allocates the result
    dtype: int  # a value of DTYPES
    shape: tuple[int, ...]
    device: int = HOST  # number of the CUDA device, or HOST


class Gathered(NamedTuple):
    """A result in the core's memory. References to `buffer` keep it alive."""

    buffer: Any  # writable buffer object; None if it has no bytes
    rows: int  # first dimension of the result


class Pending(NamedTuple):
    """A request in the core."""

    keep: object  # owns the memory the core reads and writes
    finish: Callable[[int], Any]  # makes the result from the completed handle


class Separate(NamedTuple):
    """Owns the memory of a plain tensor's request whose result is another tensor."""

    source: object
    result: Any


# No lock: each step below is one operation of a dict, which is atomic, and a finalizer may run
# `abandon` in the middle of anything.
# By handle: Pending, Separate, or just the owner of the memory, which is also the result.
_pending: Final[dict[int, object]] = {}
# Owners between "the core has it" and "the handle is in the table": an exception that arrives
# there (Ctrl-C) must not free the memory.
submitting: dict[int, object] = {}
submit_count = itertools.count()
# Abandoned handles, with the owners of their memory.
_abandoned: dict[int, object] = {}


def submit(
    collective: int,
    name: str,
    views: Sequence[View],
    *,
    keep: object,
    finish: Callable[[int], Any],
    process_set: int = WORLD_SET,
    op: int = Sum,
    root: int = 0,
    prescale: float = 1.0,
    postscale: float = 1.0,
    integers: Sequence[int] | None = None,
    blocking: bool = False,
    stream: int = 0,
    streams: Sequence[int] | None = None,
    weight: float | None = None,
) -> int:
    """Submit one request to the core and return its handle, an int for `poll` and `wait`.

    Several views are a group: they are reduced when all ranks have submitted all of it. `keep`
    stays alive until the handle is complete; `finish` makes the result during the wait. `integers`
    are the splits of an alltoall. `blocking`: this thread calls `wait` next, and does the engine's
    work there. `stream`: the stream that computes views on a device; `streams`: one for each view,
    if they differ. `weight`: this rank's weight in a weighted average.
    """
    request, owners = make_request(
        collective, name, views, process_set, op, root, prescale, postscale, integers
    )
    request.blocking = blocking
    c_weight = ffi.NULL if weight is None else ffi.new("double *", weight)
    request.weight = c_weight
    request.stream = stream
    c_streams = ffi.NULL if streams is None else ffi.new("uintptr_t[]", list(streams))
    request.streams = c_streams
    handle = _submit_request(request, keep, finish)
    del owners, c_streams, c_weight
    note_submitted(name)
    if _abandoned:
        _sweep()
    return handle


def make_request(
    collective: int,
    name: str,
    views: Sequence[View],
    process_set: int,
    op: int,
    root: int,
    prescale: float,
    postscale: float,
    integers: Sequence[int] | None,
) -> tuple[Any, tuple[Any, ...]]:
    """Return an hr_request and the owner of its memory."""
    encoded = encode_name(name)
    # One array of dimensions for all tensors; the core copies them.
    dimensions = ffi.new("int64_t[]", [d for view in views for d in view.shape] or [0])
    tensors = ffi.new("hr_tensor[]", max(len(views), 1))
    at = 0
    for tensor, view in zip(tensors, views, strict=False):
        tensor.input = view.input
        tensor.output = view.output
        tensor.dtype = view.dtype
        tensor.ndim = len(view.shape)
        tensor.shape = dimensions + at
        tensor.device = view.device + 1
        at += len(view.shape)
    c_name = ffi.from_buffer("char[]", encoded + b"\0")
    request = ffi.new("hr_request *")
    request.collective = collective
    request.name = c_name
    request.process_set = process_set
    request.op = op
    request.prescale = prescale
    request.postscale = postscale
    request.tensors_count = len(views)
    request.tensors = tensors
    c_integers = None
    try:
        request.root = root
        if integers is not None:
            c_integers = ffi.new("int64_t[]", [*integers, 0])  # NULL has another meaning
            request.integers, request.integers_count = c_integers, len(integers)
    except OverflowError:  # a rank or a split far out of range
        given = root if integers is None else list(integers)
        raise ValueError(f"'{name}': {given} is out of range") from None
    return request, (dimensions, tensors, c_name, c_integers)


def plain_tensors(
    types: tuple[type, ...],
    describe: Callable[[Any], tuple[int, int, tuple[int, ...]] | None] | str,
    exchange: object = None,
    refusals: tuple[Callable[[Any], bool], ...] = (),
) -> PlainTensors:
    """Return an object that submits plain tensors of `types` quickly.

    `describe` returns address, type and shape of a tensor, or None if it is not plain; or it is the
    name of the attribute with NumPy's array interface. If the types have `exchange`, the capsule of
    DLPack's C functions, it is not called: a tensor is plain if it is dense, in host memory, of a
    known data type, and every function of `refusals` returns false for it.
    """
    return PlainTensors(
        types, exchange, refusals, describe, _pending, Pending, _abandoned, _sweep
    )  # fmt: skip


def _submit_request(request: Any, keep: object, finish: Callable[[int], Any]) -> int:
    token = next(submit_count)
    submitting[token] = keep
    handle = int(lib.hr_submit(request))
    if handle > 0:
        _pending[handle] = Pending(keep, finish)
    del submitting[token]
    if handle <= 0:
        fail(handle)
    return handle


def poll(handle: int) -> bool:
    """Whether `wait(handle)` would return at once. ValueError for an unknown handle."""
    _find(handle)
    done = int(lib.hr_poll(handle))
    # Unknown only to the core: an interrupted `wait` has finished it.
    if done < 0 and done != -lib.HR_INVALID_ARGUMENT:
        fail(done)
    return done != 0


def wait(handle: int) -> Any:
    """Block until `handle` is complete, forget it, and return its result or raise its error.

    May be called again after a KeyboardInterrupt, until it has returned.
    """
    if (result := _finish(handle)) is not None:  # almost always
        return result.result if type(result) is Separate else result
    pending = _find(handle)
    code = block_until_complete(handle)
    unknown = code == lib.HR_INVALID_ARGUMENT and lib.hr_poll(handle) < 0
    if unknown or _pending.pop(handle, None) is None:
        raise ValueError(f"handle {handle} was synchronized by another thread meanwhile")
    try:
        if code != lib.HR_OK:
            fail(code)
        return pending.finish(handle)
    finally:
        lib.hr_release(handle)


def wait_and_go_on(handle: int, go_on: Callable[[Any], T]) -> T:
    """Return `go_on(wait(handle))`: the next steps of a call that the other ranks take as well.

    If Ctrl-C ends the wait, a thread takes them when the request is complete: like a call of one
    step, this one counts as made.
    """
    try:
        result = wait(handle)
    except KeyboardInterrupt:
        threads.start(threading.Thread(target=_go_on_later, args=(handle, go_on), daemon=True))
        raise
    return go_on(result)


def _go_on_later(handle: int, go_on: Callable[[Any], object]) -> None:
    with contextlib.suppress(Exception):  # its caller has gone
        while not poll(handle):  # a wait would report a blocked caller
            time.sleep(WAIT_SLICE_S)
        go_on(wait(handle))


def result_of(answer: Any) -> Any:
    """Return the result of a blocking call from the `answer` of `PlainTensors.allreduce`."""
    if type(answer) is int:
        return wait(answer)
    return answer.result if type(answer) is Separate else answer


def wait_all(handles: Iterable[int]) -> list[Any]:
    """Wait for every handle, even if one fails; return the results or raise the first error."""
    results: list[Any] = []
    failure: Exception | None = None
    for handle in handles:
        try:
            results.append(wait(handle))
        except Exception as error:  # raised below, when nothing is in flight
            failure = failure or error
    if failure is not None:
        raise failure
    return results


def _find(handle: int) -> Any:
    try:
        return _pending[handle]
    except (KeyError, TypeError):  # unknown, or not a possible key
        raise ValueError(
            f"there is no handle {handle!r}: it was synchronized before, or no asynchronous "
            "operation returned it"
        ) from None


def block_until_complete(handle: int) -> int:
    """Block until the core's request is complete; return its code."""
    while True:
        code = int(lib.hr_wait(handle, WAIT_SLICE_S))
        if code != lib.HR_PENDING:
            return code


def wait_at_most(handle: int, timeout_s: float) -> bool:
    """Block until `wait(handle)` would return at once, for at most `timeout_s`. Return whether."""
    end = time.monotonic() + timeout_s
    while True:
        left_s = max(end - time.monotonic(), 0.0)
        if int(lib.hr_wait(handle, min(left_s, WAIT_SLICE_S))) != lib.HR_PENDING:
            return True
        if left_s == 0:
            return False


def next_completion(seen: int) -> int:
    """Block until a request completes that `poll` has found pending; return the next `seen`.

    Returns after WAIT_SLICE_S at the latest; at once if `seen` is -1. Meanwhile this rank reports a
    blocked caller.
    """
    return int(lib.hr_next_completion(seen, WAIT_SLICE_S))


def abandon(handle: int, keep: object) -> None:
    """Give up `handle`; keep its memory alive for as long as the core may use it."""
    _abandoned[handle] = (_pending.pop(handle, None), keep)
    _sweep()


def _sweep() -> None:
    for handle in list(_abandoned):
        if lib.hr_landed(handle) != 0 and _abandoned.pop(handle, None) is not None:
            lib.hr_release(handle)


_finish: Final = plain_tensors((), lambda _: None).finish


def take(handle: int, index: int) -> Gathered:
    """Move result `index` out of a complete request. For `finish` functions."""
    result = ffi.new("hr_result *")
    check(lib.hr_take_result(handle, index, result))
    address, size = int(result.data), int(result.bytes)
    if size == 0:
        return Gathered(None, int(result.rows))
    owner = ffi.gc(ffi.cast("char *", address), lambda _: lib.hr_free(address), size)
    return Gathered(ffi.buffer(owner, size), int(result.rows))


def wait_in_stream(handle: int, stream: int) -> None:
    """Make a CUDA stream wait for the results of a complete request. Does not block."""
    check(lib.hr_wait_in_stream(handle, stream))


def rows(handle: int, index: int) -> int:
    """Return the first dimension of result `index` of a complete request."""
    number = ffi.new("int64_t *")
    check(lib.hr_result_rows(handle, index, number))
    return int(number[0])


def move(handle: int, index: int, address: int, stream: int) -> None:
    """Copy result `index` from the core's device memory to `address`, in stream order."""
    check(lib.hr_move_result(handle, index, address, stream))


def use_device(number: int, context: str) -> None:
    """Make a CUDA device that of this process, if there are devices.

    ValueError if there are only others.
    """
    check(lib.hr_use_device(number), context)


def take_numbers(handle: int, index: int) -> list[int]:
    """Move result `index`, a list of numbers, out of a complete request."""
    buffer = take(handle, index).buffer
    return [] if buffer is None else memoryview(buffer).cast("q").tolist()


def address_of(buffer: Any) -> int:
    """Address of the memory of a writable buffer object, which the caller keeps alive."""
    return int(ffi.cast("uintptr_t", ffi.from_buffer(buffer)))


def submitted() -> int:
    """Return how many requests this rank has submitted since `init`."""
    stats = ffi.new("hr_stats *")
    lib.hr_stats_now(stats)
    return int(stats.submitted)
