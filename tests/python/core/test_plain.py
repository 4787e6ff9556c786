"""Plain values as JSON: they come back as they were, and nothing else is written or read."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import pytest
import torch

from hororing._requests import plain
from hororing.torch import state

VALUES: list[Any] = [
    None, True, 0, -(10**30), 0.1, -math.inf, "", "ä\ud800", b"", bytes(range(256)), [], (), {},
    [1, (2, [b"3", {4}]), {(5, 6): {"x": None}}], state._Spec(1, (2, 3), torch.bfloat16, True),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_plain_value_comes_back_as_it_was(value: Any):
    found = plain.loads(plain.dumps(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 0, OrderedDict(a=1), [torch.ones(1)],
     state._Spec(0, (1,), torch.int8, True, b"x")],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_is_not_plain_is_a_type_error(value: Any):
    with pytest.raises(TypeError, match="plain"):
        plain.dumps(value)


@pytest.mark.parametrize(
    "text",
    [b"", b"\x80\x04N.", b'{"unknown": 1}', b'{"set": [[]]}', b'{"bytes": 1}', b"[" * 100_000,
     b'{"tuple": 1, "set": 1}', b"{}", b'{"dict": 1}', b'{"dtype": "load"}', b'{"dtype": 1}',
     b'{"tensor": [0, [1], 2, true, {"bytes": "eA=="}]}'],
)  # fmt: skip
def test_whatever_else_comes_is_a_value_error(text: bytes):
    with pytest.raises(ValueError, match="not a plain value"):
        plain.loads(text)
