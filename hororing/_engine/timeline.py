"""The timeline's first stages, which the adapters record."""

from __future__ import annotations

from typing import Final

from hororing._core import lib
from hororing._engine import state

_HOOK: Final = 0
_VIEW: Final = 1


def enabled() -> bool:
    """Whether the timeline is on."""
    return bool(lib.hr_timeline_enabled())


def path() -> str:
    """Return the present or the latest file; "": none, or not on this rank."""
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
