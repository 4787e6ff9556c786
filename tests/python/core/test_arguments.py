"""Arguments of a wrong type raise errors at once, by name; and init does not wait forever."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import mpirun
import numpy as np
import pytest
import tiers
import torch

import hororing.numpy
import hororing.torch as hvd
from hororing._api import init
from hororing._job.launchers import Launch


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    init.start(Launch())
    yield
    hvd.shutdown()


@pytest.mark.parametrize("root", [0.0, "0", None])
def test_a_root_rank_that_is_no_integer(root: object):
    for call in (hvd.broadcast, hvd.broadcast_, hvd.broadcast_async, hvd.broadcast_object):
        with pytest.raises(TypeError, match="root_rank must be an int, not"):
            call(torch.ones(2), root)
    assert hvd.broadcast(torch.ones(2), np.int64(0)).tolist() == [1, 1]


def test_a_name_that_is_no_text():
    for call in (hvd.broadcast_object, hvd.allgather_object):
        with pytest.raises(TypeError, match="name must be a str, not int"):
            call("object", name=5)
        assert call("object", name="5") in ("object", ["object"])


def test_what_is_no_process_set_cannot_be_removed():
    with pytest.raises(TypeError, match="remove_process_set: process_set must be a ProcessSet"):
        hvd.remove_process_set(5)


@pytest.mark.parametrize("wrong", [None, {}, torch.nn.Linear(1, 1)])
def test_the_state_of_what_is_no_optimizer(wrong: object):
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, not"):
        hvd.broadcast_optimizer_state(wrong, root_rank=0)


@pytest.mark.parametrize("name", ["prescale_factor", "postscale_factor"])
def test_a_factor_that_is_no_number(name: str):
    with pytest.raises(TypeError, match=f"allreduce: {name} must be a number, not str"):
        hvd.allreduce(torch.ones(2), **{name: "2"})
    assert hvd.allreduce(torch.ones(2), **{name: np.float32(2)}).tolist() == [2, 2]
    with pytest.raises(ValueError, match="nan"):
        hvd.allreduce(torch.ones(2), **{name: float("nan")})


def test_a_compression_that_is_none():
    model = torch.nn.Linear(2, 2)
    for call in (
        lambda: hvd.allreduce(torch.ones(2), compression="fp16"),
        lambda: hvd.grouped_allreduce([torch.ones(2)], compression="fp16"),
        lambda: hvd.allreduce(torch.ones(2, requires_grad=True), compression="fp16"),
        lambda: hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1), compression="fp16"
        ),
    ):
        with pytest.raises(TypeError, match=r"compression='fp16' is not a compressor; .*fp16"):
            call()


def test_masked_arrays_are_refused():
    with pytest.raises(ValueError, match="masked arrays are not supported"):
        hororing.numpy.allreduce(np.ma.masked_array([1.0, 2.0], mask=[True, False]))


def test_every_exception_is_where_the_verbs_are():
    for module in (hvd, hororing.numpy):
        assert issubclass(module.PeerLostError, module.HorovodInternalError)
        assert issubclass(module.MismatchError, ValueError)
        assert {"DuplicateNameError", "StalledError", "ShutDownError"} < set(module.__all__)


NEVER = """
import os, sys, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(60)
import hororing.numpy as hvd
try:
    hvd.init()
except hvd.TransportError as error:
    print(error, flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize("transport", tiers.choose(["auto", "mpi"], push=["auto"]))
def test_init_gives_up_on_a_rank_that_does_not_come(tmp_path: Path, transport: str):
    script = tmp_path / "never.py"
    script.write_text(NEVER)
    begin = time.monotonic()
    job = mpirun.run(
        script,
        2,
        timeout_s=50,
        environment={"HORORING_TIMEOUT_S": "1", "HORORING_TRANSPORT": transport},
    )
    assert time.monotonic() - begin < 30, job.report()
    assert job.returncode not in (None, 0), job.report()
    assert "not all ranks of the job have called it in time" in job.outputs[0], job.report()
