"""The loaded core: its C interface, and its failures as exceptions.

The one module that loads hororing/_core, so that a damaged installation is explained whatever a
script imports first.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import NoReturn

from hororing import errors

try:
    import hororing._tensors  # noqa: F401  # loads, too
    from hororing._core import ffi as ffi
    from hororing._core import lib as lib
except ImportError as error:  # a source tree that was not built, or a damaged installation
    _remedy = "install it again: pip install ."
    if (Path(__file__).parents[2] / "CMakeLists.txt").exists():
        _remedy = (
            "this is the source folder, which hides an installed hororing: run from another "
            "folder, or build in place with pip install -e ."
        )
    if error.name == "_cffi_backend":
        _remedy = "pip install cffi"
    raise ImportError(f"hororing's core cannot be loaded ({error}); {_remedy}") from error

if lib.hr_abi_version() != lib.HR_ABI_VERSION:
    raise ImportError(
        f"hororing/_core was built for version {lib.HR_ABI_VERSION} of the C interface, "
        f"hororing/lib has version {lib.hr_abi_version()}; install hororing again"
    )

VERSION: str = ffi.string(lib.hr_version()).decode()

# The texts of the latest exceptions: the log need not repeat them.
raised: deque[str] = deque(maxlen=8)

_CLASSES: dict[int, type[Exception]] = {
    lib.HR_INVALID_ARGUMENT: ValueError,
    lib.HR_MISMATCH: errors.MismatchError,
    lib.HR_DUPLICATE_NAME: errors.DuplicateNameError,
    lib.HR_NOT_INITIALIZED: errors.NotInitializedError,
    lib.HR_SHUT_DOWN: errors.ShutDownError,
    lib.HR_STALLED: errors.StalledError,
    lib.HR_TRANSPORT: errors.TransportError,
    lib.HR_INTERNAL: errors.HororingInternalError,
}


def error_for(code: int, text: str, rank: int = -1) -> Exception:
    """Make the exception for a failure of the core.

    Parameters
    ----------
    code : a positive hr_code.
    text : the core's message, as hr_last_error().
    rank : the rank to blame, as hr_last_error_rank().
    """
    raised.append(text)
    if code == lib.HR_PEER_LOST:
        return errors.PeerLostError(text, rank)
    if code not in _CLASSES:
        return errors.HororingInternalError(f"{text} (unknown code {code} of the core)")
    error = _CLASSES[code](text)
    if isinstance(error, errors.MismatchError):
        error.rank = rank
    return error


def last_error() -> str:
    """Return the text of the core's last failure on this thread."""
    return str(ffi.string(lib.hr_last_error()).decode("utf-8", "replace"))


def fail(code: int, context: str = "") -> NoReturn:
    """Raise the exception for the core's last failure on this thread; `code` may be negated."""
    raise error_for(abs(code), last_error() + context, int(lib.hr_last_error_rank()))


def check(code: int, context: str = "") -> None:
    """Raise the exception for the core's last failure on this thread if `code` is not HR_OK."""
    if code != lib.HR_OK:
        fail(code, context)
