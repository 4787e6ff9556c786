"""Parts of tests of the engine: settings of its own, what it counted, and its errors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest

import hororing.numpy as hvd


@contextlib.contextmanager
def engine(**knobs: object) -> Iterator[None]:
    """One that is configured so: REPRODUCIBLE=1, say."""
    os.environ.update({f"HORORING_{name}": str(value) for name, value in knobs.items()})
    hvd.init()
    try:
        yield
    finally:
        hvd.shutdown()
        for name in knobs:
            del os.environ[f"HORORING_{name}"]


def made_at_once(step: Callable[[], object], times: int = 2000) -> bool:
    """Whether `step` waited for a sum that was made without negotiation, in as many calls.

    That needs ranks that come to it at the same time. All ranks agree on whether they did, and so
    stop after the same call.
    """
    before = hvd.statistics()["allreduces_at_once"]
    for _ in range(times):
        step()
        if hvd.statistics()["allreduces_at_once"] > before:
            return True
    return False


@contextlib.contextmanager
def raises(kind: type[BaseException], *texts: str) -> Iterator[None]:
    """Fail unless the block raises that, and all texts are in its message."""
    with pytest.raises(kind) as caught:
        yield
    for text in texts:
        assert text in str(caught.value), f"{text!r} is not in: {caught.value}"
