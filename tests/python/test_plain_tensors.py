"""Which tensors the core takes as they lie, and that looking through DLPack finds the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hororing import collectives
from hororing._core import lib
from hororing.names import default_name
from hororing.numpy import NumpyAdapter
from hororing.torch.adapter import DTYPES, TorchAdapter

BASE = torch.arange(24.0).reshape(4, 6)


class Subclass(torch.Tensor):
    pass


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


PLAIN = {
    "matrix": BASE,
    "rows": BASE[1:3],
    "no dimensions": torch.tensor(1.0),
    "no elements": torch.empty(0, 3),
    "no elements, strange strides": torch.empty(4, 0).t(),
    "one column": BASE[:, :1].contiguous()[:, 0:1],
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "with a gradient": torch.ones(3, requires_grad=True),
    "of inference mode": inference(),
} | {str(dtype): torch.zeros(5, dtype=dtype) for dtype in DTYPES}
OTHERS = {
    "transposed": BASE.t(),
    "columns": BASE[:, 1:3],
    "every second": BASE[::2],
    "expanded": torch.ones(1).expand(3),
    "negated in name": torch._neg_view(torch.ones(3)),
    "complex": torch.zeros(3, dtype=torch.complex64),
    "sparse": BASE.to_sparse(),
    "subclass": torch.ones(3).as_subclass(Subclass),
    "8 bits": torch.zeros(3).to(torch.float8_e4m3fn),
    "no memory": torch.ones(3, device="meta"),
    "array": np.ones(3),
    "nothing": None,
}


def ways() -> list[Any]:
    """How a tensor is looked at: through DLPack, where torch has it, and by asking torch."""
    adapter = TorchAdapter()
    types = (torch.Tensor, torch.nn.Parameter)
    return [adapter.plain_tensors, collectives.plain_tensors(types, adapter.plain)]


def answer(way: Any, tensor: object, **changed: Any) -> int:
    request = {"name": "t", "set": 0, "op": 1, "before": 1.0, "after": 1.0} | changed
    return int(way.allreduce(tensor, tensor, tensor, *request.values(), False))


# There is no engine: what gets as far as the core is refused by it.
REFUSED = -lib.HR_NOT_INITIALIZED


@pytest.mark.parametrize("way", ways(), ids=["exchange", "asked"])
@pytest.mark.parametrize("name", PLAIN)
def test_what_lies_as_it_looks_goes_to_the_core(name: str, way: Any):
    assert TorchAdapter().plain(PLAIN[name]) is not None
    assert answer(way, PLAIN[name]) == REFUSED
    assert way.grouped_allreduce((BASE, PLAIN[name]), "g", 0, 1, 1.0, 1.0, False) == REFUSED


@pytest.mark.parametrize("way", ways(), ids=["exchange", "asked"])
@pytest.mark.parametrize("name", OTHERS)
def test_all_else_is_left_to_the_verbs(name: str, way: Any):
    assert answer(way, OTHERS[name]) == 0
    assert way.grouped_allreduce((BASE, OTHERS[name]), "g", 0, 1, 1.0, 1.0, False) == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"name": None}, {"name": b"t"}, {"name": "a\0b"}, {"name": "\udc80"}, {"op": 2}, {"op": 6},
        {"op": -1}, {"op": True}, {"op": 1 << 80}, {"op": "Sum"}, {"before": 1}, {"after": None},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_that_need_a_closer_look_are_left_to_the_verbs(changed: dict[str, Any]):
    assert answer(ways()[0], BASE, **changed) == 0


def test_a_name_that_was_made_for_the_call_is_one():
    assert answer(ways()[0], BASE, name=default_name("plain")) == REFUSED


def test_arrays_are_told_by_their_adapter():
    plain = NumpyAdapter().plain_tensors
    assert answer(plain, np.ones((2, 3))) == REFUSED
    assert answer(plain, np.ones((2, 3)).T) == 0
    assert answer(plain, np.ones(3, ">f4")) == 0


def test_errors_of_a_description_are_raised():
    def broken(tensor: object) -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        answer(collectives.plain_tensors((int,), broken), 1)
    with pytest.raises(TypeError, match="takes 9 arguments"):
        ways()[0].allreduce(BASE)
