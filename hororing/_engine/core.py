"""The core's last failure on this thread, as a text and as an exception."""

from __future__ import annotations

from typing import NoReturn

from hororing import errors
from hororing._core import ffi, lib


def last_error() -> str:
    """Return the text of the core's last failure on this thread."""
    return str(ffi.string(lib.hr_last_error()).decode("utf-8", "replace"))


def fail(code: int, context: str = "") -> NoReturn:
    """Raise the exception for the core's last failure on this thread; `code` may be negated."""
    raise errors.error_for(abs(code), last_error() + context, int(lib.hr_last_error_rank()))


def check(code: int, context: str = "") -> None:
    """Raise the exception for the core's last failure on this thread if `code` is not HR_OK."""
    if code != lib.HR_OK:
        fail(code, context)
