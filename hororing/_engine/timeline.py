"""The timeline: starting and stopping it, and its first stages, which the adapters record."""

from __future__ import annotations

import os
from typing import Final

from hororing import config
from hororing._engine import state
from hororing._engine.core import check, fail, lib

_HOOK: Final = 0
_VIEW: Final = 1
_GUARD: Final = 9


def enabled() -> bool:
    """Whether the timeline is on."""
    return bool(lib.hr_timeline_enabled())


def path() -> str:
    """Return the present or the latest file, or "" if this rank has none."""
    return state.process.timeline


def now_ns() -> int:
    """The timeline's clock."""
    return int(lib.hr_now_ns())


def trace_hook(name: str, begin_ns: int) -> None:
    """Draw HOOK of one gradient, until now."""
    lib.hr_trace_span(_HOOK, name.encode(), begin_ns, lib.hr_now_ns(), 0)


def trace_view(name: str, begin_ns: int, size_bytes: int) -> None:
    """Draw VIEW of one gradient, until now."""
    lib.hr_trace_span(_VIEW, name.encode(), begin_ns, lib.hr_now_ns(), size_bytes)


def trace_guard(text: str) -> None:
    """Draw GUARD, now: something that a guard has found."""
    now = lib.hr_now_ns()
    lib.hr_trace_span(_GUARD, text.encode(), now, now, 0)


def absolute(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a timeline."""
    return os.path.abspath(os.fsdecode(path))


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record the events of all ranks in `file_path` from now on.

    Only rank 0's call has an effect. A timeline in progress is finished first; with the same file
    it continues. `mark_cycles` adds CYCLE_START events. The file holds the last
    HORORING_TIMELINE_BYTES. ValueError if it cannot be written, or HORORING_TIMELINE_STEPS chooses
    the steps already.

    >>> hvd.start_timeline("timeline.json")
    >>> mean = hvd.allreduce(loss, name="loss")
    >>> hvd.stop_timeline()
    """
    state.topology()
    path = absolute(file_path)
    if "\0" in path:
        raise ValueError(f"start_timeline: the path {path!r} holds a zero character")
    if config.load()["TIMELINE_STEPS"]:
        raise ValueError(
            "start_timeline: HORORING_TIMELINE_STEPS chooses the steps that are recorded; unset it"
        )
    same = path == state.process.timeline and lib.hr_timeline_enabled()
    if same and not mark_cycles:
        return
    check(lib.hr_timeline_start(b"" if same else os.fsencode(path), mark_cycles))
    state.process.timeline = path


def stop_timeline() -> None:
    """Finish the timeline; returns when the file is complete. Does nothing if there is none.

    Only rank 0's call has an effect. Until then, the timeline also shows what other ranks do next.
    """
    state.topology()
    code = int(lib.hr_timeline_stop())
    # Another rank, which waits for no file, may have ended its script. Then the file is complete.
    if code not in (lib.HR_OK, lib.HR_SHUT_DOWN):
        fail(code)
