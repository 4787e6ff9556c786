"""Coarse-to-fine search: ranges narrow around the best, ranks agree, trials stop early."""

from __future__ import annotations

import math
import sys

import pytest
import session
from hypothesis import given
from hypothesis import strategies as st

from hororing.toolkit.tracking.sweep import Range, StopEarly, coarse_to_fine

try:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
except ModuleNotFoundError:
    optuna = None
needs_optuna = pytest.mark.skipif(optuna is None, reason="Optuna is not installed")


@given(
    st.floats(1e-6, 1e3), st.floats(1.001, 1e4), st.floats(0, 1), st.floats(0.01, 0.99),
    st.booleans(),
)  # fmt: skip
def test_a_narrower_range_lies_inside_and_holds_the_center(low, ratio, place, share, log):
    whole = Range(low, low * ratio, log)
    center = low * ratio**place if log else low + (low * ratio - low) * place
    center = min(max(center, whole.low), whole.high)
    part = whole.around(center, share)
    assert whole.low <= part.low < part.high <= whole.high
    slack = 1e-9 * whole.high
    assert part.low - slack <= center <= part.high + slack
    scale = math.log if log else float
    width = (scale(part.high) - scale(part.low)) / (scale(whole.high) - scale(whole.low))
    assert width == pytest.approx(share, rel=1e-3)


def test_whole_numbers_stay_whole():
    assert Range(1, 64, integer=True).around(20, 0.25) == Range(12, 28, integer=True)
    for wrong in ((1, 1), (2, 1)):
        with pytest.raises(ValueError, match="low must be below high"):
            Range(*wrong)
    with pytest.raises(ValueError, match="above 0 where log"):
        Range(0, 1, log=True)
    with pytest.raises(ValueError, match="whole"):
        Range(1.5, 4, integer=True)  # Optuna would draw 1


@needs_optuna
def test_rounds_close_in_on_the_best_and_seeds_repeat():
    space = {"lr": Range(1e-5, 10, log=True), "depth": Range(1, 8, integer=True), "bn": ["a", "b"]}
    tried: list[tuple] = []

    def objective(attempt):
        p = attempt.params
        tried.append((attempt.round, p["lr"]))
        return abs(math.log10(p["lr"]) + 2) + abs(p["depth"] - 3) + (p["bn"] == "a")

    found = coarse_to_fine(objective, space, rounds=(15, 10, 10), seed=3)
    assert (found.params["depth"], found.params["bn"]) == (3, "b")
    assert found.value < 0.5
    spread = [
        max(x) / min(x) for x in ([lr for r, lr in tried if r == round_] for round_ in range(3))
    ]
    assert spread[0] > 100
    assert spread[1] <= 1e6**0.3 * 1.01
    assert spread[2] <= 1e6**0.09 * 1.01
    first, tried[:] = list(tried), []
    coarse_to_fine(objective, space, rounds=(15, 10, 10), seed=3)
    assert tried == first


@needs_optuna
def test_hopeless_trials_stop_early_and_failures_do_not_count():
    steps: dict[int, int] = {}

    def objective(attempt):
        if attempt.number == 7:
            return math.nan
        for step in range(10):
            steps[attempt.number] = step
            attempt.report(step, attempt.params["x"])
        return attempt.params["x"]

    found = coarse_to_fine(objective, {"x": Range(0, 1)}, rounds=(20,), maximize=True, seed=1)
    states = [trial.state.name for trial in found.study.trials]
    assert len(states) == 20
    assert states[7] == "FAIL"
    assert {"COMPLETE", "PRUNED"} <= set(states)
    assert all(steps[i] < 9 for i, state in enumerate(states) if state == "PRUNED")
    assert found.value == max(t.value for t in found.study.trials if t.state.name == "COMPLETE")


@needs_optuna
def test_a_stored_study_goes_on_with_other_values(tmp_path):
    tried = []

    def objective(attempt):
        tried.append(attempt.params["x"])
        return attempt.params["x"]

    for _ in range(2):
        storage = f"sqlite:///{tmp_path}/study.db"
        coarse_to_fine(objective, {"x": Range(0, 1)}, rounds=(3,), storage=storage, seed=1)
    assert len(set(tried)) == 6


@needs_optuna
def test_no_result_at_all_is_an_error():
    with pytest.raises(RuntimeError, match="none of 3 trials"):
        coarse_to_fine(lambda _: math.inf, {"x": Range(0, 1)}, rounds=(2, 1))


def test_without_optuna_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ModuleNotFoundError, match="pip install optuna"):
        coarse_to_fine(lambda _: 0.0, {"x": Range(0, 1)})
    with pytest.raises(ValueError, match="shrink"):
        coarse_to_fine(lambda _: 0.0, {"x": Range(0, 1)}, shrink=1)


def case_all_ranks_try_the_same_values_and_stop_together():
    import numpy as np

    import hororing.numpy as hvd

    hvd.init()
    if optuna is None:
        with pytest.raises(ModuleNotFoundError, match="pip install optuna"):
            coarse_to_fine(lambda _: 0.0, {"x": Range(0, 1)})
        return

    def objective(attempt):
        x = attempt.params["x"]
        everywhere = hvd.allgather(np.array([x]), name="x")
        assert set(everywhere.tolist()) == {x}
        for step in range(5):
            attempt.report(step, (x - 0.5) ** 2)
        if attempt.number == 3 and hvd.rank() == 1:
            raise StopEarly
        return (x - 0.5) ** 2 + hvd.rank()

    found = coarse_to_fine(objective, {"x": Range(0, 1)}, rounds=(8, 4), seed=2)
    assert found.value < 0.05
    assert (found.study is None) == (hvd.rank() > 0)
    if found.study is not None:
        assert found.study.trials[3].state.name == "PRUNED"
    with pytest.raises(Exception) as caught:  # noqa: PT011  # Optuna's
        coarse_to_fine(objective, {"x": Range(0, 1)}, storage="no such storage")
    assert str(caught.value).startswith("rank 0: ") == (hvd.rank() > 0)
    hvd.barrier()


test_in_a_job_of_two_ranks = session.on_ranks(globals(), 2, push=[2], session="numpy")
