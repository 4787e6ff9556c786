"""Commits in a file: a new job continues from there. Push tier, 5 s."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiers

from hororing import elastic
from hororing._engine import membership
from hororing._job.rendezvous.generations import Member, World
from hororing.elastic import saved
from hororing.elastic import state as state_module
from hororing.elastic.variables import VariablesState

ROOT = Path(__file__).parents[3]


def state(rank: int = 0, **objects: Any) -> elastic.ObjectState:
    return elastic.ObjectState(lambda each: each, lambda: rank, **objects)


def test_a_state_begins_with_the_commit_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "state"
    first = state(epoch=0, log=[])
    first.save_to(path, every=2)
    assert (first.epoch, first.log) == (0, [])
    for epoch in range(1, 6):
        first.epoch = epoch
        first.log.append(epoch)
        first.commit()
    second = state(epoch=0, log=None)
    second.save_to(path)
    assert (second.epoch, second.log, second._commits) == (4, [1, 2, 3, 4], 4)
    second.epoch = 9
    second.restore()
    assert second.epoch == 4
    assert list(tmp_path.iterdir()) == [path]
    other = state(rank=1, epoch=0, log=None)
    other.save_to(path)
    other.commit()
    assert (other.epoch, saved.read(path)[0]) == (4, 4)  # type: ignore[index]
    begun = World(2, (Member("0" * 16, "host", 1, 7, 0), Member("1" * 16, "host", 2, 0, 0)))
    monkeypatch.setattr(membership, "history", lambda: [begun])
    newcomer = state(rank=1, epoch=0, log=None)
    newcomer.save_to(path)
    assert newcomer.epoch == 0  # it receives the state of the others


def test_a_full_disk_is_an_error_in_the_log_and_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(logging.getLogger("hororing"), "propagate", True)
    file, wrote = tmp_path / "missing" / "state", tmp_path / "missing"
    mine = state(epoch=0)
    mine.save_to(file, every=2)
    for mine.epoch in (1, 2, 3):
        mine.commit()
    assert len(caplog.records) == 1  # not for each commit
    assert f"commit 2 is not in {file} (" in caplog.text
    wrote.mkdir()
    monkeypatch.setattr(state_module, "_AGAIN_S", 0.0)
    mine.epoch = 5
    mine.commit()
    mine.commit()  # not due, and the last one was written
    assert saved.read(file) == (4, ("ObjectState", {"epoch": 5}))


def test_a_file_that_cannot_be_is_an_error_that_names_it(tmp_path: Path):
    path = tmp_path / "state"
    path.write_bytes(b"no pickle")
    with pytest.raises(ValueError, match=rf"{path} cannot be read"):
        state().save_to(path)
    saved.write(path, 1, ("ObjectState", {"other": 1}))
    with pytest.raises(
        ValueError, match=rf"{path} is from another script.*\['other'\].*\['epoch'\]"
    ):
        state(epoch=0).save_to(path)
    with pytest.raises(ValueError, match="every=0"):
        state().save_to(path, 0)
    with pytest.raises(TypeError, match="State can be saved in memory only"):
        elastic.State(lambda each: each, lambda: 0)._kept()


def test_no_other_user_gets_between_a_commit_and_its_file(tmp_path: Path):
    path = tmp_path / "state"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("theirs")
    (tmp_path / f".state.{os.getpid()}").symlink_to(elsewhere)  # a name that could be known
    saved.write(path, 1, {})
    assert elsewhere.read_text() == "theirs"
    assert path.stat().st_mode & 0o777 == 0o600
    assert not path.is_symlink()
    path.unlink()
    os.mkfifo(path)
    signal.alarm(20)  # a read would wait for ever
    with pytest.raises(ValueError, match="cannot be read"):
        saved.read(path)
    signal.alarm(0)


def test_a_failed_write_leaves_the_commit_before(tmp_path: Path):
    path = tmp_path / "state"
    mine = state(value=1)
    mine.save_to(path)
    mine.commit()
    with pytest.raises(Exception, match="pickle"):
        saved.write(path, 2, lambda: 0)
    assert saved.read(path) == (1, ("ObjectState", {"value": 1}))
    assert list(tmp_path.iterdir()) == [path]


class Variable:
    def __init__(self, value: np.ndarray) -> None:
        self.value = value

    def assign(self, value: np.ndarray) -> None:
        self.value = value


class Variables(VariablesState):
    def __init__(self, *values: np.ndarray, **objects: Any) -> None:
        self.held = [Variable(each) for each in values]
        super().__init__(**objects)
        self._rank = lambda: 0

    def _variables(self) -> list[Any]:
        return self.held

    def _array(self, variable: Any) -> Any:
        return variable.value

    def _leave_if_due(self, replayed: bool) -> None:
        """Do nothing: ranks neither come nor go."""


def test_variables_are_in_the_file_too(tmp_path: Path):
    first, second = Variables(np.ones(3), epoch=1), Variables(np.zeros(3), epoch=0)
    first.save_to(tmp_path / "state")
    first.held[0].assign(np.arange(3.0))
    first.commit()
    second.save_to(tmp_path / "state")
    assert (second.held[0].value.tolist(), second.epoch) == ([0, 1, 2], 1)
    second.held[0].assign(np.zeros(3))
    second.restore()
    assert second.held[0].value.tolist() == [0, 1, 2]
    more = Variables(np.zeros(3), np.zeros(2), epoch=0)
    with pytest.raises(ValueError, match="is from another script"):
        more.save_to(tmp_path / "state")


def test_a_torch_state_goes_on_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("hororing.torch.elastic.state")
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    monkeypatch.setattr(module, "state", alone)
    monkeypatch.setattr("hororing.torch.elastic.sampler.state", alone)
    monkeypatch.setattr(module.TorchState, "_leave_if_due", lambda self, replayed: None)

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        return module.TorchState(
            model, torch.optim.Adam(model.parameters(), lr=seed / 10), step=0,
            sampler=module.ElasticSampler(range(40)),
        )  # fmt: skip

    def train(state: Any, steps: int) -> None:
        inputs = torch.arange(8.0).reshape(2, 4)
        for _ in range(steps):
            state.optimizer.zero_grad()
            state.model(inputs + state.step).square().sum().backward()
            state.optimizer.step()
            state.sampler.record_batch(0, 3)
            state.step += 1
            state.commit()

    whole, first, second = made(1), made(1), made(2)
    train(whole, 8)
    first.save_to(tmp_path / "state")
    train(first, 5)
    second.save_to(tmp_path / "state")
    assert (second.step, second.sampler.processed_num) == (5, 15)
    train(second, 3)
    for one, other in zip(
        whole.model.state_dict().values(), second.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match=r"it has \['TorchState'\]"):
        state(step=0).save_to(tmp_path / "state")


SCRIPT = """
import os, signal, sys, time
import numpy as np
import hororing.numpy as hvd
from hororing import elastic; from hororing._engine import membership
import hororing

hvd.init()
path, fails = sys.argv[1], int(sys.argv[2])
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0, total=np.zeros(3))
state.save_to(path, every=4)


def show(*words):  # in one write: both ranks share stdout, which torchrun leaves unbuffered
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())


@elastic.run
def train(state):
    show("begin", life, state.step)
    while state.step < 20:
        if life < fails and state.step == 6 + 8 * life and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        mine = np.arange(3.0) * (state.step + hvd.rank())
        state.total = 2 * state.total + hvd.allreduce(mine, op=hvd.Sum, name="total")
        state.step += 1
        state.commit()
    return state.total


show("end", train(state).tolist())
"""


@tiers.full
def test_torchrun_starts_all_ranks_again_from_the_last_commit(tmp_path: Path):  # full tier, 15 s
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    told = []
    for fails in (2, 0):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             "--max-restarts", "2", "--monitor-interval", "0.1", str(script),
             str(tmp_path / f"state.{fails}"), str(fails)],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        told.append(done.stdout.splitlines())
    begun = sorted({line for line in told[0] if line.startswith("begin")})
    assert begun == ["begin 0 0", "begin 1 4", "begin 2 12"]
    ends = {line for lines in told for line in lines if line.startswith("end")}
    assert len(ends) == 1, told
    assert np.isfinite(float(ends.pop().split()[-1].strip("]")))
