"""Helpers for tests of the engine: settings, statistics and errors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest

import hororing.numpy as hvd


@contextlib.contextmanager
def engine(**knobs: object) -> Iterator[None]:
    """Run an engine with these settings, such as REPRODUCIBLE=1."""
    os.environ.update({f"HORORING_{name}": str(value) for name, value in knobs.items()})
    hvd.init()
    try:
        yield
    finally:
        hvd.shutdown()
        for name in knobs:
            del os.environ[f"HORORING_{name}"]


def made_at_once(step: Callable[[], object]) -> bool:
    """Call `step` until it sums without negotiation, 10,000 times at most; return whether it did.

    This needs ranks that call it at the same time. All ranks agree on whether they did, so they
    stop after the same call.
    """
    before = hvd.statistics()["allreduces_at_once"]
    for _ in range(10_000):
        step()
        if hvd.statistics()["allreduces_at_once"] > before:
            return True
    return False


@contextlib.contextmanager
def raises(kind: type[BaseException], *texts: str) -> Iterator[None]:
    """Fail unless the block raises `kind`, with all `texts` in its message."""
    with pytest.raises(kind) as caught:
        yield
    for text in texts:
        assert text in str(caught.value), f"{text!r} is not in: {caught.value}"
