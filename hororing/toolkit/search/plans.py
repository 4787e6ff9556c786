"""Which trial comes next, and whether one goes on: Optuna's trials, one after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

from hororing.toolkit.search.trial import Outcome


@dataclass
class Assignment:
    """A trial for a process set. States are named by (member, generation)."""

    number: int
    params: dict[str, Any]
    seed: int
    key: tuple[int, int] | None = None  # under which its ranks keep the state of `report`
    state: tuple[int, int] | None = None  # the state to begin with
    state_at: int | None = None  # the process set that has it
    first_step: int = 0
    parent: int | None = None
    trial: Any = None  # Optuna's
    last: float | None = None  # the latest report
    steps: int = 0  # number of reports
    reports: list[tuple[int, float]] = field(default_factory=list)


class Plan(Protocol):
    """What the hub needs to know of a scheduler."""

    def next(self, process_set: int) -> Assignment | None:
        """The next trial of a process set; None: none now."""

    def report(self, trial: Assignment, step: int, value: float) -> str:
        """Return "go on", "stop" or "pause"."""

    def tell(self, trial: Assignment, status: str, value: float | None, process_set: int) -> None:
        """A trial has ended: "completed", "pruned", "failed" or "paused"."""

    def best(self, outcomes: list[Outcome]) -> tuple[dict[str, Any], float] | None:
        """The best values and objective; None: there is none."""


class Trials:
    """As many trials as asked for, which Optuna's sampler draws and its pruner stops."""

    def __init__(
        self, optuna: Any, study: Any, ranges: dict[str, Any], trials: int, seed: int
    ) -> None:
        self._optuna, self._study, self._ranges = optuna, study, ranges
        self._left, self._seed = trials, seed

    def next(self, process_set: int) -> Assignment | None:
        """Ask Optuna."""
        if not self._left:
            return None
        self._left -= 1
        trial = self._study.ask(self._ranges)
        return Assignment(trial.number, dict(trial.params), self._seed + trial.number, trial=trial)

    def report(self, trial: Assignment, step: int, value: float) -> str:
        """Tell Optuna, and ask its pruner."""
        trial.trial.report(value, step)
        return "stop" if trial.trial.should_prune() else "go on"

    def tell(self, trial: Assignment, status: str, value: float | None, process_set: int) -> None:
        """Tell Optuna."""
        states = self._optuna.trial.TrialState
        if status == "completed":
            self._study.tell(trial.trial, value)
        else:
            self._study.tell(trial.trial, state=getattr(states, _STATES[status]))

    def best(self, outcomes: list[Outcome]) -> tuple[dict[str, Any], float] | None:
        """Optuna's, which counts trials of a study that goes on."""
        try:
            best = self._study.best_trial
        except ValueError:
            return None
        return dict(best.params), float(best.value)


_STATES = {"pruned": "PRUNED", "failed": "FAIL"}


def is_finite(value: Any) -> bool:
    """Whether it is a number that can be compared."""
    return isinstance(value, float) and math.isfinite(value)
