"""Memory of this rank that the other ranks of its host see: reduced where it lies, uncopied."""

from __future__ import annotations

from hororing._core import ffi, lib
from hororing.failures import last_error


def allocate(size: int) -> memoryview | None:
    """Return `size` writable bytes of zeros, or None where there is no such memory, or no more.

    An allreduce in place on a tensor in it copies nothing. Whether other ranks have such memory,
    too, does not matter. It is freed with the last view of it (``numpy.frombuffer`` and
    ``torch.frombuffer`` make views), and stays valid after `shutdown()`; but an engine that starts
    later treats it as private memory.
    """
    address = lib.hr_arena_allocate(size)
    if not address:
        return None
    owner = ffi.gc(ffi.cast("char *", address), _free, size)
    return memoryview(ffi.buffer(owner, size))


def why_not() -> str:
    """Why the latest `allocate` of this thread returned None."""
    return last_error()


def _free(owner: object) -> None:
    lib.hr_arena_free(int(ffi.cast("uintptr_t", owner)))
