"""The core's library for MPI, which stands beside the core where it was built."""

from __future__ import annotations

import os
from pathlib import Path

from hororing._core import ffi, lib
from hororing.failures import fail


def library() -> Path:
    """Where it is, if it was built."""
    return Path(__file__).parent / "lib" / "libhororing_mpi.so"


def is_built() -> bool:
    """Whether it was built."""
    return library().exists()


def describe() -> tuple[str, str]:
    """Library version of MPI, and its thread level ("" before it is initialised).

    TransportError where it cannot be loaded. Does not initialise it.
    """
    text = ffi.new("char[]", 1024)
    path = os.fsencode(library()) if is_built() else b""
    code = int(lib.hr_describe_mpi(path, text, len(text)))
    if code != lib.HR_OK:
        fail(code)
    version, _, level = ffi.string(text).decode("utf-8", "replace").partition("\n")
    return version, level.strip()
