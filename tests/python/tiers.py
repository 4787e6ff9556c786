"""Which tests run when (docs/testing.md).

`make test` runs the push tier, `make test-all` (pytest --full) all. A test is of the push tier
unless it is marked `full`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

full = pytest.mark.full


def choose(values: Iterable[Any], push: Iterable[Any]) -> list[Any]:
    """Parameters: those not in `push` are of the full tier only. A tuple holds several at once."""
    kept = list(push)
    return [
        value
        if value in kept
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=full)
        for value in values
    ]
