"""The tracebacks of uncaught exceptions: the user's frames only.

An error of hororing is explained by the line of the script that led to it, not by frames of
hororing, of autograd or of a training loop. HORORING_LOG_LEVEL=debug shows all of them.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from pathlib import Path
from types import TracebackType

from hororing import config
from hororing.errors import DuplicateNameError, HororingInternalError

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_FRAMEWORKS = re.compile(
    r"[\\/](site|dist)-packages[\\/](torch|tensorflow|keras|tf_keras|jax|jaxlib)[\\/]"
)


@functools.cache
def _libraries() -> tuple[str, ...]:
    import sysconfig  # reads the build's configuration: only a failed rank pays for it

    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple(sysconfig.get_path(name) + os.sep for name in names)


def shorten(error: BaseException) -> TracebackType | None:
    """Remove frames from an exception that ends the process, and from its causes.

    Returns
    -------
    TracebackType
        The exception's new traceback.
    """
    if _is_debug():
        return error.__traceback__
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        before = each.__context__
        if _is_ours(each) and before is not None and str(each) == str(before):
            each.__suppress_context__ = True  # the same error again, as another type
        each.__traceback__ = _shortened(each)
        left += [each.__cause__, None if each.__suppress_context__ else each.__context__]
    return error.__traceback__


def _is_debug() -> bool:
    try:
        level = str(config.load()["LOG_LEVEL"])
    except ValueError:  # the exception may be about just that
        level = ""
    return level == "debug" or logging.getLogger("hororing").isEnabledFor(logging.DEBUG)


def _is_ours(error: BaseException) -> bool:
    """Whether hororing has raised it: by its type, or by where it began."""
    if isinstance(error, (HororingInternalError, DuplicateNameError)):
        return True
    entries = _entries(error.__traceback__)
    return bool(entries) and _file(entries[-1]).startswith(_PACKAGE)


def _shortened(error: BaseException) -> TracebackType | None:
    entries = _entries(error.__traceback__)
    if _is_ours(error):
        kept = [each for each in entries if _is_users(_file(each))]
        # A script that is itself installed: whatever is neither ours nor a framework's.
        kept = kept or [each for each in entries if not _is_hidden(_file(each))]
    else:
        kept = [each for each in entries[:-1] if not _is_hidden(_file(each))] + entries[-1:]
    return _chain(kept) if kept else error.__traceback__


def _is_users(file: str) -> bool:
    return not file.startswith((_PACKAGE, "<frozen ", *_libraries()))


def _is_hidden(file: str) -> bool:
    ours = file.startswith((_PACKAGE, "<frozen runpy>"))
    return ours or _FRAMEWORKS.search(file) is not None


def _file(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def _entries(trace: TracebackType | None) -> list[TracebackType]:
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    return entries


def _chain(entries: list[TracebackType]) -> TracebackType | None:
    made: TracebackType | None = None
    for each in reversed(entries):
        made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return made
