"""Horovod's verbs, by hororing. They fail except between init and shutdown."""

from __future__ import annotations

import os
from typing import Any

import hororing.torch as hvd
from hororing.torch import Sum

__all__ = ["Sum"]
awake = False
cycles: set[str] = set()  # the cycle times that it was initialized with


def init() -> None:
    global awake
    assert not awake
    awake = True
    cycles.add(os.environ["HOROVOD_CYCLE_TIME"])


def shutdown() -> None:
    global awake
    assert awake
    awake = False


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    verb = getattr(hvd, name)

    def called(*args: Any, **options: Any) -> Any:
        assert awake, f"{name} outside of its turn"
        return verb(*args, **options)

    return called
