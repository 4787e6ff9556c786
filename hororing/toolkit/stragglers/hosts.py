"""Which ranks share a host."""

from __future__ import annotations

from hororing import runtime
from hororing._core import ffi, lib


def host_names() -> list[str]:
    """The host of every rank, by rank. NotInitializedError before `init`."""
    return [ffi.string(lib.hr_host_name(r)).decode() for r in range(runtime.size())]


def numbered(names: list[str]) -> list[int]:
    """The hosts as numbers 0, 1, ... in the order of their first ranks."""
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [order[name] for name in names]
