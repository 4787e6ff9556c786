"""Calls the handler of csrc/jax for GPUs as XLA does, over the fake of tests/fake_gpu.

jaxlib for CUDA would make these structs. Layouts: csrc/jax/xla_api.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import fake_gpu
import numpy as np

from hororing.jax._ffi import plugin

P, I32, I64, SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t
TYPES = {"int32": 4, "float32": 11, "float64": 12}  # XLA_FFI_DataType
HEAD = [("struct_size", SIZE), ("extensions", P)]


def struct(**fields: Any) -> type[ctypes.Structure]:
    """Return a struct with these fields; `head` stands for the beginning of every struct."""
    members = [each for name, kind in fields.items()
               for each in (HEAD if kind == "head" else [(name, kind)])]  # fmt: skip
    return type("Struct", (ctypes.Structure,), {"_fields_": members})


ErrorCreate = struct(head="head", message=ctypes.c_char_p, code=I32)
StreamGet = struct(head="head", context=P, stream=P)
DeviceOrdinalGet = struct(head="head", context=P, ordinal=I32)
FUNCTION = ctypes.CFUNCTYPE(P, P)
Api = struct(
    head="head", version=P * 3, internal=P, error_create=FUNCTION, unused=P * 3,
    stream_get=FUNCTION, unused_too=P * 8, futures=P * 3, run_id_get=P, device_ordinal_get=FUNCTION,
)  # fmt: skip
Buffer = struct(head="head", type=I32, data=P, rank=I64, dimensions=ctypes.POINTER(I64))
Span = struct(data=ctypes.c_char_p, size=SIZE)
Array = struct(type=I32, size=SIZE, data=P)
Buffers = struct(head="head", size=I64, kinds=P, buffers=P)
Attributes = struct(head="head", size=I64, kinds=P, names=P, values=P)
Call = struct(
    head="head", api=P, context=P, stage=I32, arguments=Buffers, results=Buffers,
    attributes=Attributes, future=P,
)  # fmt: skip
_errors: list[str] = []


@FUNCTION
def _create(call: int) -> int:
    _errors.append(ErrorCreate.from_address(call).message.decode())
    return 1


def _api(stream: int, device: int, size: int | None) -> Any:
    @FUNCTION
    def tell_stream(call: int) -> int:
        StreamGet.from_address(call).stream = stream
        return 0

    @FUNCTION
    def tell_device(call: int) -> int:
        DeviceOrdinalGet.from_address(call).ordinal = device
        return 0

    api = Api(error_create=_create, stream_get=tell_stream, device_ordinal_get=tell_device)
    api.struct_size = ctypes.sizeof(Api) if size is None else size
    return api


def _buffers(arrays: Sequence[np.ndarray[Any, Any]], keep: list[Any]) -> Any:
    made = []
    for array in arrays:
        dimensions = (I64 * max(array.ndim, 1))(*array.shape)
        made.append(Buffer(type=TYPES[array.dtype.name], data=array.ctypes.data, rank=array.ndim,
                           dimensions=dimensions))  # fmt: skip
        keep.append(dimensions)
    pointers = (P * len(made))(*map(ctypes.addressof, made))
    keep += [made, pointers]
    return Buffers(size=len(made), buffers=ctypes.addressof(pointers))


class Stream:
    """A stream of XLA on a device."""

    def __init__(self, device: int) -> None:
        self._device, self._stream = device, fake_gpu.new_stream()

    def run(self, work: Callable[[], object]) -> None:
        """Add work, such as a kernel that computes an argument."""
        fake_gpu.run_in(self._stream, work)

    def synchronize(self) -> None:
        """Wait for all of it."""
        fake_gpu.synchronize(self._stream)

    def call(
        self,
        name: str,
        integers: Sequence[int],
        numbers: Sequence[float],
        arguments: Sequence[np.ndarray[Any, Any]],
        results: Sequence[np.ndarray[Any, Any]],
        api_size: int | None = None,
    ) -> str:
        """Call the handler. Return its error, or ""."""
        keep: list[Any] = []
        api = _api(self._stream, self._device, api_size)
        given = (I64 * len(integers))(*integers), (ctypes.c_double * len(numbers))(*numbers)
        values = (
            Array(size=len(integers), data=ctypes.addressof(given[0])),
            Span(name.encode(), len(name)),
            Array(size=len(numbers), data=ctypes.addressof(given[1])),
        )
        pointers = (P * 3)(*map(ctypes.addressof, values))
        call = Call(
            struct_size=ctypes.sizeof(Call), api=ctypes.addressof(api),
            arguments=_buffers(arguments, keep), results=_buffers(results, keep),
            attributes=Attributes(size=3, values=ctypes.addressof(pointers)),
        )  # fmt: skip
        handler = plugin._library.hororing_jax_execute_on_gpu
        handler.restype = P
        _errors.clear()
        failed = handler(ctypes.byref(call))
        assert bool(failed) == bool(_errors)
        return _errors[0] if failed else ""
