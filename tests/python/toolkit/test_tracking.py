"""Records of runs: complete after a kill, averaged over ranks, compared; and other trackers."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import mpirun
import numpy as np
import pytest
import session
import tiers
from live_job import LiveJob

from hororing import __main__ as main
from hororing.toolkit import tracking
from hororing.toolkit.tracking import RunRecord, TensorBoard, compare, read_run
from hororing.toolkit.tracking import record as record_module
from hororing.toolkit.tracking.circumstances import git_state


def test_a_run_is_written_as_it_goes_and_read_back(tmp_path):
    config = {"lr": 0.1, "layers": [8, 4], "optimizer": {"name": "lars", "eps": 1e-9}}
    with RunRecord(tmp_path, config, seed=3, maximize=["accuracy"]) as record:
        for step in range(3):
            record.log(step, {"loss": np.float32(1 / (step + 1)), "accuracy": 0.5 + step % 2})
            assert read_run(record.path).metrics["loss"].steps == [*range(step + 1)]
        record.note("all is well")
        assert read_run(record.path).status == "unfinished"
    run = read_run(record.path)
    assert (run.status, run.torn, run.starts) == ("completed", 0, 1)
    assert (run.config, run.head["seed"], run.notes) == (config, 3, ["all is well"])
    assert run.metrics["loss"].last == (pytest.approx(1 / 3), 2)
    assert run.metrics["accuracy"].best(True) == (1.5, 1)
    assert run.metrics["accuracy"].best(False) == (0.5, 0)
    assert run.head["ranks"] == len(run.head["hosts"]) == 1
    assert run.head["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "hororing" in run.head["versions"]
    for line in record.path.read_text().splitlines():  # strictly by RFC 8259
        json.loads(line, parse_constant=pytest.fail)


def test_numbers_that_json_does_not_have_come_back(tmp_path):
    with RunRecord(tmp_path, {"limit": math.inf, "path": Path("x"), "a": np.arange(2)}) as record:
        for step, loss in enumerate([2.0, math.nan, -math.inf, 3.0]):
            record.log(step, {"loss": loss})
    run = read_run(record.path)
    assert run.config == {"limit": "inf", "path": "x", "a": [0, 1]}
    assert math.isnan(run.metrics["loss"].values[1])
    assert run.metrics["loss"].best(False) == (-math.inf, 2)
    assert run.metrics["loss"].best(True) == (3.0, 3)


def test_a_line_that_was_cut_short_is_counted_and_does_not_swallow_the_next(tmp_path):
    with RunRecord(tmp_path, name="a") as record:
        record.log(0, {"loss": 1.0})
        record.log(1, {"loss": 0.5})
    whole = record.path.read_bytes()
    for length in range(len(whole.splitlines()[0]) + 1, len(whole)):
        record.path.write_bytes(whole[:length])
        run = read_run(record.path)
        assert run.torn <= 1
        assert len(run.metrics) <= 1
    cut = whole[: whole.index(b'"loss": 0.5')]
    record.path.write_bytes(cut)
    with RunRecord(tmp_path, name="a") as resumed:
        resumed.log(1, {"loss": 0.25})
    run = read_run(resumed.path)
    assert (run.torn, run.starts, run.status) == (1, 2, "completed")
    assert run.metrics["loss"].values == [1.0, 0.25]
    assert record.path.read_bytes().startswith(cut)  # the file only grows
    told = subprocess.run(
        [sys.executable, "-m", "hororing", "compare", record.path], capture_output=True, text=True
    )
    assert told.returncode == 0
    assert told.stderr == f"{record.path}: 1 unreadable lines are left out\n"


@pytest.mark.parametrize("name", ["../b", "a/b", ".."])
def test_records_stay_in_their_folder(tmp_path, name):
    with pytest.raises(ValueError, match="must be that of a file in"):
        RunRecord(tmp_path / "runs", name=name)
    assert list(tmp_path.iterdir()) == []


def test_an_error_ends_a_run_as_failed(tmp_path):
    record = RunRecord(tmp_path)
    with pytest.raises(KeyError), record:
        raise KeyError("layer")
    run = read_run(record.path)
    assert (run.status, run.notes) == ("failed", ["KeyError: 'layer'"])
    with pytest.raises(ValueError, match="closed"):
        record.log(1, {"loss": 1})
    record.close()  # may be repeated


@pytest.mark.parametrize(("code", "status"), [(None, "completed"), (0, "completed"), (3, "failed")])
def test_an_exit_ends_a_run_as_its_code_says(tmp_path, code, status):
    record = RunRecord(tmp_path)
    with pytest.raises(SystemExit), record:
        sys.exit(code)
    assert read_run(record.path).status == status


def test_a_new_rank_0_goes_on_with_the_file(tmp_path, monkeypatch):
    first = RunRecord(tmp_path)
    with monkeypatch.context() as other_rank:
        other_rank.setattr(record_module, "_rank", lambda: 1)
        other_rank.setattr(record_module, "_from_rank_0", lambda mine: (str(first.path), None))
        second = RunRecord(tmp_path)
    first.log(1, {"loss": 3.0})
    second.log(2, {"loss": 2.0})
    second.close()
    run = read_run(first.path)
    assert (run.metrics["loss"].values, run.status) == ([3.0, 2.0], "completed")


def test_what_is_no_record_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"kind": "metrics"}\n[1]\n')
    with pytest.raises(ValueError, match="not the record of a run"):
        read_run(tmp_path / "x.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        RunRecord(tmp_path / "file")


def test_the_state_of_the_repository_is_told(tmp_path):
    assert git_state(str(tmp_path)) is None

    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "trunk")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    state = git_state(str(tmp_path))
    assert (state["branch"], len(state["commit"]), state["changed"]) == ("trunk", 40, [])
    (tmp_path / "file").write_text("2")
    assert git_state(str(tmp_path))["changed"] == ["M file"]


def test_compare_finds_the_changed_hyper_parameter_and_nothing_else(tmp_path, capsys):
    losses = {"a": [1.0, 0.3, 0.4], "b": [1.0, 0.2]}
    for name, values in losses.items():
        config = {"lr": 0.1 if name == "a" else 0.2, "model": {"width": 8, "depth": 2}}
        if name == "b":
            config["model"]["depth"] = 3
            config["new"] = True
        with RunRecord(tmp_path, config, name=name, seed=1, maximize=["accuracy"]) as record:
            for step, loss in enumerate(values):
                record.log(step, {"loss": loss, "accuracy": 1 - loss})
    files = [str(tmp_path / f"{name}.jsonl") for name in losses]
    found = compare(map(read_run, files))
    assert found.changed == {"lr": [0.1, 0.2], "model.depth": [2, 3], "new": [None, True]}
    assert found.circumstances == {}
    assert found.last["loss"] == [(0.4, 2), (0.2, 1)]
    assert found.best["loss"] == [(0.3, 1), (0.2, 1)]
    assert found.best["accuracy"] == [(0.7, 1), (0.8, 1)]
    assert main.main(["compare", *files]) == 0
    printed = capsys.readouterr().out
    assert [line.split() for line in printed.splitlines()][:4] == [
        ["a", "b"],
        ["lr", "0.1", "0.2"],
        ["model.depth", "2", "3"],
        ["new", "-", "True"],
    ]
    assert main.main(["compare", "--maximize", "loss", *files]) == 0
    assert re.search("best loss +1 @0 +1 @0", capsys.readouterr().out)
    assert main.main(["compare", "--maximize", "f1", *files]) == 1
    assert "no run has a metric 'f1'; there are ['loss', 'accuracy']" in capsys.readouterr().err
    assert main.main(["compare", str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err


def test_compare_tells_of_other_seeds_and_runs_with_other_metrics(tmp_path):
    for seed in (1, 2):
        with RunRecord(tmp_path, {"lr": 0.1}, name=str(seed), seed=seed) as record:
            record.log(0, {f"loss {seed}": 1.0})
    found = compare(read_run(tmp_path / f"{seed}.jsonl") for seed in (1, 2))
    assert (found.changed, found.circumstances) == ({}, {"seed": [1, 2]})
    assert found.last == {"loss 1": [(1.0, 0), None], "loss 2": [None, (1.0, 0)]}
    assert "no hyper-parameter differs" in str(found)


# ---------------------------------------------------------------------------------------------
# Other trackers


class Fake:
    """A package that records its calls."""

    def __init__(self):
        self.calls: list[tuple] = []

    def __getattr__(self, name):
        def call(*args, **options):
            self.calls.append((name, args, options))
            return self

        return call


@pytest.mark.parametrize("fails", [False, True])
def test_weights_and_biases_gets_what_the_record_gets(tmp_path, monkeypatch, fails):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    other = tracking.WeightsAndBiases(project="digits")
    try:
        with RunRecord(tmp_path, {"lr": 1}, name="a", seed=2, trackers=[other]) as record:
            record.log(5, {"loss": 0.5})
            assert not fails or 1 / 0
    except ZeroDivisionError:
        pass
    options = {"name": "a", "config": {"lr": 1, "seed": 2}, "project": "digits"}
    assert fake.calls == [
        ("init", (), options),
        ("log", ({"loss": 0.5},), {"step": 5}),
        ("finish", (), {"exit_code": int(fails)}),
    ]


def test_mlflow_gets_what_the_record_gets(tmp_path, monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    other = tracking.MLflow(experiment_id="7")
    with RunRecord(tmp_path, {"o": {"lr": 1}}, name="a", seed=2, trackers=[other]) as record:
        record.log(5, {"loss": 0.5})
    assert fake.calls == [
        ("start_run", (), {"run_name": "a", "experiment_id": "7"}),
        ("log_params", ({"o.lr": 1, "seed": 2},), {}),
        ("log_metrics", ({"loss": 0.5},), {"step": 5}),
        ("end_run", (), {"status": "FINISHED"}),
    ]
    with RunRecord(tmp_path, {"lr": 1}, name="b", trackers=[tracking.MLflow()]):
        assert fake.calls[-1] == ("log_params", ({"lr": 1},), {})  # no seed


def test_trackers_that_are_not_installed_are_left_out_or_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.warns(UserWarning, match="pip install wandb"):
        record = RunRecord(tmp_path, trackers=[tracking.WeightsAndBiases()])
    record.log(0, {"loss": 1})
    record.close()
    with pytest.raises(ModuleNotFoundError, match="pip install wandb"):
        RunRecord(tmp_path, name="b", trackers=[tracking.WeightsAndBiases(required=True)])
    assert read_run(tmp_path / "b.jsonl").status == "failed"


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.util import tensor_util

    other = TensorBoard(str(tmp_path / "tb"), required=True)
    with RunRecord(tmp_path, name="a", trackers=[other]) as record:
        for step in range(3):
            record.log(step, {"loss": 1 / (step + 1)})
        events = event_accumulator.EventAccumulator(str(tmp_path / "tb/a")).Reload()
        found = events.Tensors("loss")  # during the run
    assert [event.step for event in found] == [0, 1, 2]
    values = [float(tensor_util.make_ndarray(event.tensor_proto)) for event in found]
    assert values == pytest.approx([1, 1 / 2, 1 / 3])


# ---------------------------------------------------------------------------------------------
# On several ranks


def train_until_killed(folder: str) -> None:
    import hororing.numpy as hvd

    hvd.init()
    print("pid", os.getpid(), flush=True)
    record = RunRecord(folder, {"lr": 0.1}, name="killed", seed=4)
    for step in range(10**6):
        record.log(step, {"loss": float(step)})
        print(f"step {step}", flush=True)


def test_a_job_that_is_killed_leaves_a_record_with_its_last_metrics(tmp_path):
    with LiveJob(Path(__file__), 2, "train_until_killed", str(tmp_path)) as job:
        job.wait_until_all_say("step")
        os.kill(job.pid(0), 9)
        job.end()
        last = max(int(line.split()[1]) for line in job.printed(0).splitlines()[1:])
    run = read_run(tmp_path / "killed.jsonl")
    assert (run.status, run.torn, run.head["ranks"]) == ("unfinished", 0, 2)
    steps = run.metrics["loss"].steps
    assert steps == [*range(len(steps))]
    assert last <= steps[-1] <= last + 1  # all steps logged before the kill are in the record


def case_metrics_are_averaged_over_ranks_and_rank_0_writes():
    import hororing.numpy as hvd

    hvd.init()
    folder = Path(os.environ["TMPDIR"], "runs")
    with RunRecord(folder, {"lr": hvd.rank()}) as record:
        r = hvd.rank()
        assert record.log(0, {"a": r, "b": 10 * r}) == {"a": 1.0, "b": 10.0}
        # Means of uneven shards; a rank without samples has NaN.
        values = {"loss": float("nan") if r == 1 else 3.0 * r}
        assert record.log(1, values, weight=[1, 0, 2][r]) == {"loss": 4.0}
        assert math.isnan(record.log(2, {"loss": 1.0}, weight=0)["loss"])
    hvd.barrier()
    run = read_run(record.path)
    assert [*folder.iterdir()] == [record.path]
    assert run.config == {"lr": 0}
    assert len(run.head["hosts"]) == 3
    assert run.metrics["loss"].values[0] == 4.0


def case_ranks_that_disagree_hear_of_it_everywhere():
    import hororing.numpy as hvd

    folder = Path(os.environ["TMPDIR"], "other")
    with RunRecord(folder) as record:
        names = {"loss": 1.0} if hvd.rank() < 2 else {"lost": 1.0}
        with pytest.raises(ValueError, match=r"rank 0: \['loss'\]; rank 2: \['lost'\]"):
            record.log(0, names)
        with pytest.raises(ValueError, match="rank 1: weight must be finite"):
            record.log(0, {"loss": 1.0}, weight=-1 if hvd.rank() == 1 else 1)
        with pytest.raises(ValueError, match="rank 2: metric 'loss' must be one number, not array"):
            record.log(0, {"loss": np.ones(2) if hvd.rank() == 2 else 1.0})
        with pytest.raises(ValueError, match="rank 1: step must be one number, not 'last'"):
            record.log("last" if hvd.rank() == 1 else 0, {"loss": 1.0})
        with pytest.raises(ValueError, match="rank 1: metrics must be a dict, not "):
            record.log(0, [("loss", 1.0)] if hvd.rank() == 1 else {"loss": 1.0})
        assert record.log(1, {"loss": 1.0}) == {"loss": 1.0}
    with pytest.raises(ValueError, match="closed"):
        record.log(2, {"loss": 1.0})
    with pytest.raises(ValueError, match="dictionary"):
        RunRecord(folder, config="lr=0.1")


def case_a_folder_that_cannot_be_written_is_an_error_on_every_rank():
    import hororing.numpy as hvd

    file = Path(os.environ["TMPDIR"], "no folder")
    if hvd.rank() == 0:
        file.write_text("")
    hvd.barrier()
    with pytest.raises(OSError, match="no folder"):
        RunRecord(file)


class Down(Exception):
    """Of a tracker; cannot be pickled, or its copy cannot be made."""

    def __init__(self, server: str, part: object) -> None:
        super().__init__(f"{server} is down")
        self.part = part


class Offline(tracking.TensorBoard):
    package = "json"

    def start(self, module, run):
        raise Down("tracker", threading.Lock() if self.folder else None)


def case_a_tracker_that_does_not_start_is_an_error_on_every_rank():
    import hororing.numpy as hvd

    for folder in ("", "file"):
        kind: type[Exception] = RuntimeError if hvd.rank() else Down
        with pytest.raises(kind, match="tracker is down"):
            RunRecord(Path(os.environ["TMPDIR"], "offline"), trackers=[Offline(folder)])


def fit(folder: str) -> None:
    import keras

    import hororing.keras as hvd
    from hororing.toolkit.keras.tracking import RunRecordCallback

    hvd.init()
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    x = np.full((8, 2), 1.0 + hvd.rank(), np.float32)
    with RunRecord(folder, name="keras") as record:
        recorded = RunRecordCallback(record)
        history = model.fit(x, x[:, :1], epochs=3, callbacks=[recorded], verbose=0).history
    losses = hvd.allgather_object(history["loss"])
    if hvd.rank() == 0:
        found = read_run(record.path)
        assert found.metrics["loss"].steps == [0, 1, 2]
        means = np.mean(losses, axis=0)
        np.testing.assert_allclose(found.metrics["loss"].values, means, rtol=1e-6)


@tiers.full
def test_keras_records_what_fit_tells_averaged_over_ranks(tmp_path):
    environment = {"KERAS_BACKEND": "torch"}
    job = mpirun.run(__file__, 2, "fit", str(tmp_path), environment=environment)
    assert job.returncode == 0, job.report()


test_in_a_job_of_three_ranks = session.on_ranks(globals(), 3, session="numpy")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
