"""One trial: what its ranks see of it, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hororing.extension import ProcessSet


@dataclass(frozen=True)
class Outcome:
    """The end of a trial, or of one part of it under population-based training."""

    number: int
    params: dict[str, Any]
    status: str  # "completed", "pruned", "failed"; "paused": the part ended, the member goes on
    value: float | None  # the objective; the last report if the trial did not complete
    why: str = ""  # it failed: the rank and its error
    ranks: list[int] = field(default_factory=list)
    seconds: float = 0.0
    member: int | None = None  # population-based training: of the population
    parent: int | None = None  # the member whose weights this part began with


class Trial:
    """One trial, on the ranks of its process set.

    Attributes
    ----------
    number : int
        Of the trial, from 0.
    params : dict
        Name -> value, the same on all ranks of the trial.
    seed : int
        Of this trial: the same in each search with the same `seed`.
    process_set : ProcessSet
        The ranks of the trial; pass it to `DistributedOptimizer` and to the verbs.
    first_step : int
        The step to begin with; above 0 where population-based training goes on.
    state : object
        What `report` got last, to go on from there; None: begin anew.
    """

    def __init__(
        self,
        number: int,
        params: dict[str, Any],
        seed: int,
        process_set: ProcessSet,
        ask: Callable[[Trial, int, float, Any], None],
        state: Any = None,
        first_step: int = 0,
    ) -> None:
        self.number, self.params, self.seed = number, params, seed
        self.process_set = process_set
        self.state, self.first_step = state, first_step
        self._ask = ask

    def report(self, step: int, value: float, state: Any = None) -> None:
        """Report progress; the ranks of the trial together. The first one's value is used.

        Parameters
        ----------
        step : int
            Grows from report to report.
        value : float
            The objective so far. NaN and infinities end the trial as failed.
        state : object, optional
            From which another process can go on after this step, such as ``{"model":
            model.state_dict(), "optimizer": optimizer.state_dict()}``. Needed with
            ``scheduler="pbt"``, which copies the first rank's; others leave it alone.

        Raises
        ------
        StopEarly : the trial ends here: it is hopeless, has diverged, or is interrupted to go on
            elsewhere. Do not catch it.
        """
        self._ask(self, int(step), float(value), state)
