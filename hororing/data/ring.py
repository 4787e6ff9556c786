"""Python objects through the core's rings (csrc/pipeline/ring.h): one producer, one consumer.

A ring lies in memory without a name (memfd_create), so that nothing can be left behind, however its
processes end; others get it by its file descriptor. NumPy arrays and whatever else pickle keeps out
of band (protocol 5) are copied into the slot and need not be copied out of it.

    slot:  number of buffers, bytes of the pickle, sizes of the buffers (uint64), pickle, buffers
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from typing import Any

import cloudpickle

from hororing._core import ffi, lib
from hororing.failures import last_error

_ALIGNMENT = 64


class ItemTooLarge(ValueError):
    """An object does not fit into a slot."""


def create(slots: int, slot_bytes: int) -> int:
    """Make a ring and return its file descriptor, which is the caller's to close.

    Pages are taken when they are first written to.

    Raises
    ------
    ValueError : unless `slots` is a power of two (at most 65536) and `slot_bytes` positive.
    """
    size = lib.hr_ring_bytes(slots, slot_bytes)
    if size == 0:
        raise ValueError(
            f"a ring of slots={slots} with slot_bytes={slot_bytes}: slots must be a power of two "
            "up to 65536, and slot_bytes positive"
        )
    descriptor = os.memfd_create("hororing.ring")
    try:
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        if lib.hr_ring_format(_address(memory), size, slots, slot_bytes) != lib.HR_OK:
            raise ValueError(last_error())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class RingEnded(RuntimeError):
    """The other side has closed the ring, or its process has ended."""


class _Side:
    """One side of a ring. The memory lives as long as this, or a view of it, does."""

    def __init__(self, descriptor: int, side: int, other_pid: int) -> None:
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._view = memoryview(self._memory)
        self._base = _address(self._memory)
        self._ring = lib.hr_ring_open(self._base, len(self._view), side, other_pid)
        if self._ring == ffi.NULL:
            raise ValueError(last_error())
        self._slot = ffi.new("uintptr_t *")
        self._bytes = ffi.new("int64_t *")

    def close(self) -> None:
        """End the other side's waits."""
        ring, self._ring = self._ring, ffi.NULL
        if ring != ffi.NULL:
            lib.hr_ring_close(ring)

    def _check(self, code: int) -> bool:
        """Return whether a wait has succeeded, and not only lasted long enough."""
        if code not in (lib.HR_OK, lib.HR_PENDING):
            raise RingEnded(last_error())
        return bool(code == lib.HR_OK)

    def _at_slot(self, size: int) -> memoryview:
        begin = int(self._slot[0]) - self._base
        return self._view[begin : begin + size]


class Producer(_Side):
    """The side that puts objects in."""

    def __init__(self, descriptor: int, slot_bytes: int, other_pid: int = 0) -> None:
        super().__init__(descriptor, 0, other_pid)
        self._slot_bytes = slot_bytes

    def put(self, item: Any, timeout_s: float) -> bool:
        """Copy an object into the next slot; False when none became free in time.

        Raises
        ------
        ItemTooLarge : and nothing was put.
        RingEnded : the consumer has closed the ring, or died.
        """
        buffers: list[pickle.PickleBuffer] = []
        try:
            text = pickle.dumps(item, protocol=5, buffer_callback=buffers.append)
        except (pickle.PicklingError, AttributeError, TypeError):  # of the main script, or local
            buffers.clear()
            text = cloudpickle.dumps(item, protocol=5, buffer_callback=buffers.append)
        parts = [buffer.raw() for buffer in buffers]
        head = struct.pack(f"={2 + len(parts)}Q", len(parts), len(text), *map(len, parts))
        places = []
        end = len(head) + len(text)
        for part in parts:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + len(part)
            places.append(slice(begin, end))
        if end > self._slot_bytes:
            raise ItemTooLarge(
                f"an item of {end} bytes does not fit into slots of {self._slot_bytes}; "
                f"pass slot_bytes={end} or more"
            )
        if not self._check(lib.hr_ring_reserve(self._ring, timeout_s, self._slot)):
            return False
        slot = self._at_slot(end)
        slot[: len(head)] = head
        slot[len(head) : len(head) + len(text)] = text
        for place, part in zip(places, parts, strict=True):
            slot[place] = part
        lib.hr_ring_publish(self._ring, end)
        return True


class Consumer(_Side):
    """The side that takes objects out."""

    def __init__(self, descriptor: int, other_pid: int = 0) -> None:
        super().__init__(descriptor, 1, other_pid)

    def take(self, timeout_s: float, *, copy: bool) -> list[Any]:
        """Return the next object in a list; an empty one when none came in time.

        Parameters
        ----------
        copy : False for arrays that lie in the slot: valid until it is released.

        Raises
        ------
        RingEnded : the producer has closed the ring, or died, and everything that it had put in is
            taken.
        """
        if not self._check(lib.hr_ring_take(self._ring, timeout_s, self._slot, self._bytes)):
            return []
        slot = self._at_slot(self._bytes[0])
        count, text_bytes = struct.unpack_from("=2Q", slot)
        sizes = struct.unpack_from(f"={count}Q", slot, 16)
        end = 16 + 8 * count + text_bytes
        text = slot[end - text_bytes : end]
        buffers = []
        for size in sizes:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + size
            buffers.append(bytearray(slot[begin:end]) if copy else slot[begin:end])
        return [pickle.loads(text, buffers=buffers)]

    def release(self) -> None:
        """Give the oldest slot that was taken back."""
        if lib.hr_ring_release(self._ring) != lib.HR_OK:
            raise ValueError(last_error())


def _address(memory: mmap.mmap) -> int:
    return int(ffi.cast("uintptr_t", ffi.from_buffer(memory)))
