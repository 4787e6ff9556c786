"""Which tests run when (CONTRIBUTING.md).

`make test` runs the push tier, and `make test-all` (pytest --full) runs all tests. A test is in the
push tier unless it is marked `full`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

full = pytest.mark.full


def choose(values: Iterable[Any], push: Iterable[Any]) -> list[Any]:
    """Return parameters; those not in `push` are in the full tier. A tuple has several at once."""
    kept = list(push)
    return [
        value
        if value in kept
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=full)
        for value in values
    ]
