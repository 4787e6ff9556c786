"""Tensors that the core takes directly; DLPack and torch's attributes give the same answer."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import hororing.numpy as hvd
from hororing._core import lib
from hororing._requests import handles
from hororing._requests.names import default_name
from hororing.numpy import NumpyAdapter
from hororing.torch._tensor.adapter import REDUCED, TorchAdapter

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
} | {str(dtype): torch.zeros(5, dtype=dtype) for dtype in REDUCED}
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
    """Return the two ways to inspect a tensor: DLPack, if torch has it, and torch's attributes."""
    adapter = TorchAdapter()
    types = (torch.Tensor, torch.nn.Parameter)
    return [adapter.plain_tensors, handles.plain_tensors(types, adapter.plain)]


def answer(way: Any, tensor: object, **changed: Any) -> Any:
    request = {"name": "t", "set": 0, "op": 1, "before": 1.0, "after": 1.0} | changed
    return way.allreduce(tensor, tensor, tensor, *request.values(), False)


# Without an engine, the core refuses every request that reaches it.
REFUSED = -lib.HR_NOT_INITIALIZED


@pytest.fixture(autouse=True, scope="module")
def no_engine() -> None:
    """End the engine that a test of another file may have left in this process."""
    hvd.shutdown()


@pytest.mark.parametrize("way", ways(), ids=["exchange", "asked"])
@pytest.mark.parametrize("name", PLAIN)
def test_what_lies_as_it_looks_goes_to_the_core(name: str, way: Any):
    assert TorchAdapter().plain(PLAIN[name]) is not None
    assert answer(way, PLAIN[name]) == REFUSED
    assert way.grouped_allreduce((BASE, PLAIN[name]), "g", 0, 1, 1.0, 1.0, False) == REFUSED


@pytest.mark.parametrize("way", ways(), ids=["exchange", "asked"])
@pytest.mark.parametrize("name", OTHERS)
def test_all_else_is_left_to_the_verbs(name: str, way: Any):
    assert answer(way, OTHERS[name]) is None
    assert way.grouped_allreduce((BASE, OTHERS[name]), "g", 0, 1, 1.0, 1.0, False) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"name": None}, {"name": b"t"}, {"name": "a\0b"}, {"name": "\udc80"}, {"op": 2}, {"op": 6},
        {"op": -1}, {"op": True}, {"op": 1 << 80}, {"op": "Sum"}, {"before": 1}, {"after": None},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_that_need_a_closer_look_are_left_to_the_verbs(changed: dict[str, Any]):
    assert answer(ways()[0], BASE, **changed) is None


def test_a_name_that_was_made_for_the_call_is_one():
    assert answer(ways()[0], BASE, name=default_name("plain")) == REFUSED


ARRAY = np.arange(24.0).reshape(4, 6)
FROZEN = np.ones(3)
FROZEN.flags.writeable = False
PLAIN_ARRAYS = {
    "matrix": ARRAY,
    "rows": ARRAY[1:3],
    "no dimensions": np.ones(()),
    "no elements": np.empty((0, 3)),
    "one column": ARRAY[:, :1].copy()[:, 0:1],
} | {name: np.zeros(5, name) for name in handles.REDUCED if name != "bfloat16"}
OTHER_ARRAYS = {
    "transposed": ARRAY.T,
    "columns": ARRAY[:, 1:3],
    "read-only": FROZEN,
    "foreign byte order": np.ones(3, np.dtype(np.float32).newbyteorder()),
    "not aligned": np.frombuffer(bytearray(25), np.uint8)[1:].view(np.float64),
    "bfloat16": np.ones(3, ml_dtypes.bfloat16),
    "8 bits": np.ones(3, ml_dtypes.float8_e5m2),
    "masked": np.ma.masked_array(np.ones(3)),
    "scalar": np.float32(1),
    "nothing": None,
} | {
    name: np.zeros(3, name)
    for name in ("complex64", "uint32", "longdouble", "U3", "O", "M8[s]", "m8[s]", "i4,f4", "V2")
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN_ARRAYS)
def test_arrays_go_to_the_core(name: str):
    assert answer(NumpyAdapter().plain_tensors, PLAIN_ARRAYS[name]) == REFUSED


@pytest.mark.parametrize("name", OTHER_ARRAYS)
def test_other_arrays_are_left_to_the_verbs(name: str):
    assert answer(NumpyAdapter().plain_tensors, OTHER_ARRAYS[name]) is None


def test_errors_of_a_description_are_raised():
    def broken(tensor: object) -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        answer(handles.plain_tensors((int,), broken), 1)
    with pytest.raises(TypeError, match="takes 9 arguments"):
        ways()[0].allreduce(BASE)
