"""Registers, on import, the custom calls of csrc/jax with XLA."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any, Final

import jax

from hororing._engine import state

LIBRARY: Final = Path(__file__).parents[2] / "lib" / "libhororing_jax.so"
TARGET: Final = "hororing_request"
_OLDEST: Final = (0, 5)
# As long as shutdown() waits for other requests that all ranks have made.
_PROGRAMS_LIMIT_S: Final = 30.0


def load(library: Path, target: str) -> Any:
    """Register the handlers of `library` with XLA as `target`, and return the library.

    Raises
    ------
    ImportError : this JAX cannot use them.
    """
    if jax.__version_info__ < _OLDEST:
        raise _refused(library, "it is too old")
    try:
        loaded = ctypes.CDLL(str(library))
        for platform, handler in (
            ("cpu", loaded.hororing_jax_execute), ("CUDA", loaded.hororing_jax_execute_on_gpu)
        ):  # fmt: skip
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform=platform)
    except Exception as error:  # XLA refuses the version of the interface, or the file is missing
        raise _refused(library, str(error)) from None
    return loaded


def _refused(library: Path, reason: str) -> ImportError:
    return ImportError(
        f"hororing.jax cannot be used: JAX {jax.__version__} does not load hororing's custom calls "
        f"from {library} ({reason}). Use JAX 0.5 or later, and install hororing again in this "
        "environment where the file is missing or was built on another system",
        name="hororing.jax",
        path=str(library),
    )


_library: Final = load(LIBRARY, TARGET)
state.at_shutdown(_library.hororing_jax_end_threads)


def _await_programs() -> None:
    """Wait for programs that JAX has started and not finished: peers wait for their requests.

    As far as the script still holds a result. A rank that waits in vain ends at the limit.
    """
    limit = time.monotonic() + _PROGRAMS_LIMIT_S
    for array in jax.live_arrays():
        while not (array.is_deleted() or array.is_ready()) and time.monotonic() < limit:
            time.sleep(0.001)


state.before_shutdown(_await_programs)


def _forget_programs() -> None:
    """Compiled programs hold ranks, sizes and numbers of process sets of an earlier job."""
    global _jobs
    _jobs += 1
    if _jobs > 1:
        jax.clear_caches()


_jobs = 0
state.at_init(_forget_programs)
