"""Equality of nested values with tensors and arrays, by type and bit."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and np.array_equal(a, b)
    if isinstance(a, dict):
        return (
            isinstance(b, dict)
            and list(a) == list(b)
            and all(same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
        )
    if isinstance(a, (list, tuple)):
        return (
            type(a) is type(b)
            and len(a) == len(b)
            and all(same(x, y) for x, y in zip(a, b, strict=True))
        )
    if inspect.isfunction(a):
        return a(5) == b(5)
    if isinstance(a, type):
        return a.__name__ == b.__name__ and a.value == b.value
    return type(a) is type(b) and a == b
