"""Trials side by side: ranks go on after failures, results do not depend on the number of sets."""

from __future__ import annotations

import math
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import session
import tiers

import hororing.numpy as hvd
from hororing.toolkit.search import Range, call, hub, search
from hororing.toolkit.tracking import read_run

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)
SPACE = {"x": Range(0, 1), "kind": ["a", "b"]}


def averaged(trial, value):
    """The mean over the trial's ranks, which are alike."""
    mine = np.array([float(value)])
    return float(hvd.allreduce(mine, name="value", process_set=trial.process_set)[0])


def distance(trial, steps=4, wait_s=0.0):
    value = math.nan
    for step in range(steps):
        time.sleep(wait_s)
        away = abs(trial.params["x"] - 0.3) + (trial.params["kind"] == "a")
        value = averaged(trial, away + 1 / (step + 1))
        trial.report(step, value)
    return value


def case_other_ranks_go_on_where_trials_fail_diverge_or_hang():
    hvd.init(process_sets="dynamic")

    def train(trial):
        second = trial.process_set.rank() == 1
        if trial.number == 2 and second:
            time.sleep(0.3)
            raise ValueError("no such layer")  # the first rank is in an allreduce by then
        if trial.number == 4 and second:
            time.sleep(60)
        if trial.number == 5:
            trial.report(0, math.nan)
        if trial.number == 6:
            return math.inf
        return distance(trial, wait_s=0.01)

    found = search(SPACE, train, trials=16, ranks_per_trial=2, timeout_s=1.0, seed=5)
    whys = {each.number: each.why for each in found.trials}
    status = {each.number: each.status for each in found.trials}
    assert len(status) == 16
    assert {number for number in status if status[number] == "failed"} == {2, 4, 5, 6}
    assert {"completed", "pruned"} <= set(status.values())
    for each in found.trials:  # nothing of an earlier trial is left in their process sets
        if each.status == "completed":
            x, kind = each.params["x"], each.params["kind"]
            assert each.value == pytest.approx(abs(x - 0.3) + (kind == "a") + 1 / 4)
    sets = {each.number: each.ranks for each in found.trials}
    assert whys[2].startswith(f"rank {sets[2][1]}: ValueError: no such layer (in ")
    assert whys[4].startswith("no report and no end for 1 s; ")
    assert f"rank {sets[4][1]} was in {__file__}" in whys[4]
    assert f"rank {sets[4][0]} was waiting for other ranks in {__file__}" in whys[4]
    assert whys[5] == "diverged: nan in step 0"
    assert whys[6] == "train returned inf"
    assert set(map(tuple, sets.values())) == {(0, 1), (2, 3)}
    assert found.gap_s < 1
    assert found.lost == []
    assert (found.study is None) == (hvd.rank() > 0)
    hvd.add_process_set([0, 1])  # those of the search are gone
    hvd.shutdown()


def case_the_best_is_that_of_one_trial_at_a_time():
    hvd.init(process_sets="dynamic")
    results = [
        search(SPACE, distance, trials=12, ranks_per_trial=ranks, scheduler=None, seed=2)
        for ranks in (1, 2, 4)
    ]
    assert len({(str(each.params), each.value) for each in results}) == 1
    tried = [sorted((t.number, t.params["x"]) for t in each.trials) for each in results]
    assert tried[0] == tried[1] == tried[2]
    assert results[0].value == min(each.value for each in results[0].trials)


def case_a_population_copies_weights_between_sets():
    def train(trial):
        weight = np.array([5.0]) if trial.state is None else trial.state["weight"]
        for step in range(trial.first_step, 6):
            weight = weight - trial.params["lr"] * 2 * weight
            value = averaged(trial, weight[0] ** 2)
            trial.report(step, value, state={"weight": weight})

    space = {"lr": Range(1e-4, 0.3, log=True)}
    made = [
        search(space, train, trials=5, ranks_per_trial=ranks, scheduler="pbt", seed=1)
        for ranks in (1, 2, 4)
    ]
    assert len({(each.params["lr"], each.value) for each in made}) == 1
    alone = search(space, train, trials=5, ranks_per_trial=2, scheduler="pbt", interval=9, seed=1)
    assert made[0].value < alone.value  # without exchange
    for each in made:
        ends = {(t.member, t.number): t for t in each.trials}
        copied = [t for t in ends.values() if t.parent not in (None, t.member)]
        assert copied
    with pytest.raises(RuntimeError, match='scheduler="pbt" needs state='):
        search(SPACE, distance, trials=2, ranks_per_trial=2, scheduler="pbt")


def case_ranks_that_do_not_come_back_are_lost_and_the_rest_goes_on():
    def train(trial):
        if trial.number == 1 and trial.process_set.rank() == 1:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])  # like code that ignores it
            time.sleep(4)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGURG])
        return distance(trial)

    before, hub.GRACE_S = hub.GRACE_S, 0.5
    try:
        found = search(SPACE, train, trials=6, ranks_per_trial=2, scheduler=None, timeout_s=1)
    finally:
        hub.GRACE_S = before
    lost = next(each for each in found.trials if each.number == 1)
    assert found.lost == lost.ranks
    assert f"ranks [{lost.ranks[1]}] do not respond" in lost.why
    assert sum(each.status == "completed" for each in found.trials) == 5


def case_records_and_a_study_that_goes_on():
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
    storage = optuna.storages.InMemoryStorage() if hvd.rank() == 0 else None
    common = {"ranks_per_trial": 2, "storage": storage, "seed": 1}
    search(SPACE, distance, trials=3, scheduler="median", folder=folder, **common)
    found = search(SPACE, distance, trials=3, folder=folder, maximize=False, **common)
    assert sorted(each.number for each in found.trials) == [3, 4, 5]
    hvd.barrier()
    runs = [read_run(path) for path in sorted(Path(folder).glob("*.jsonl"))]
    assert [run.head["seed"] for run in runs] == [1, 2, 3, 4, 5, 6]
    values = {each.number: each.value for each in found.trials}
    assert [run.metrics["value"].last[0] for run in runs[3:]] == [values[n] for n in (3, 4, 5)]
    assert all(set(run.config) == {"x", "kind"} and run.head["ranks"] == 2 for run in runs)
    hvd.barrier()
    # Records are written while the next trial runs.
    plain = call._recorder
    call._recorder = lambda *given: lambda *ended: (plain(*given)(*ended), time.sleep(0.6))
    try:
        found = search(SPACE, distance, trials=2, ranks_per_trial=4, scheduler=None, folder=folder)
    finally:
        call._recorder = plain
    assert found.gap_s < 0.5
    assert len(found.trials) == 2
    hvd.barrier()
    if hvd.rank() == 0:
        shutil.rmtree(folder)


def case_a_rank_that_leaves_ends_the_search_on_all():
    def train(trial):
        if trial.number == 3 and trial.process_set.rank() == 0:
            raise KeyboardInterrupt
        time.sleep(0.02)
        return distance(trial)

    with pytest.raises((KeyboardInterrupt, RuntimeError)) as caught:
        search(SPACE, train, trials=30, ranks_per_trial=2, scheduler=None)
    if caught.type is RuntimeError:
        assert "has left the search" in str(caught.value)
    kinds = hvd.allgather_object(caught.type is KeyboardInterrupt)
    assert kinds.count(True) == 1
    found = search(SPACE, distance, trials=3, ranks_per_trial=2)  # the job goes on
    assert len(found.trials) == 3


def case_arguments_that_do_not_fit():
    for wrong, text in (
        ({"ranks_per_trial": 3}, "must divide the 4 ranks"),
        ({"scheduler": "hyperband"}, 'is not "asha"'),
        ({"interval": 2}, 'scheduler="pbt" only'),
        ({"timeout_s": 0}, "above 0"),
        ({"trials": 0}, "at least 1"),
        ({"scheduler": "pbt", "storage": "sqlite://"}, "weights are lost"),
    ):
        with pytest.raises(ValueError, match=text):
            search(SPACE, distance, **wrong)
    with pytest.raises(ValueError, match="a list of choices"):
        search({"x": "ab"}, distance)
    with pytest.raises(
        RuntimeError, match="none of 2 trials had a result: train returned and reported"
    ):
        search(SPACE, lambda trial: None, trials=2)
    hvd.barrier()


test_in_a_job_of_four_ranks = session.on_ranks(globals(), 4, push=[4])


HANGS = """
import signal, time
import hororing.numpy as hvd
from hororing.toolkit.search import Range, hub, search

hub.GRACE_S = 0.5

def train(trial):
    if trial.number == 1 and trial.process_set.rank() == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])
        time.sleep(1000)
    trial.report(0, 1.0)

found = search({"x": Range(0, 1)}, train, trials=4, ranks_per_trial=2, timeout_s=1)
print("found", found.value, flush=True)
"""


@tiers.full
def test_a_rank_that_hangs_for_good_ends_with_the_others(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    command = [sys.executable, "-m", "hororing.hororun", "-np", "4", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout.count("found 1.0") == 3
    assert "trial 1 hangs on rank " in done.stderr
