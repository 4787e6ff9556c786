"""An engine for a part of a test, with settings of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import hororing.numpy as hvd


@contextlib.contextmanager
def engine(**knobs: object) -> Iterator[None]:
    """One that is configured so: WIRE="bfloat16", say."""
    os.environ.update({f"HORORING_{name}": str(value) for name, value in knobs.items()})
    hvd.init()
    try:
        yield
    finally:
        hvd.shutdown()
        for name in knobs:
            del os.environ[f"HORORING_{name}"]
