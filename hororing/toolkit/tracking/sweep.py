"""Coarse-to-fine search for hyper-parameters, on Optuna (``pip install optuna``).

Each round draws from narrower ranges around the best trial so far. Samples, pruning and storage are
Optuna's; this module narrows the ranges and makes all ranks of a job try the same values.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import hororing.numpy as hvd


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; `log`: evenly by their logarithms; `integer`: whole ones."""

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"{self}: low must be below high, and above 0 where log is set")
        if self.integer and not (float(self.low).is_integer() and float(self.high).is_integer()):
            raise ValueError(f"{self}: low and high must be whole numbers where integer is set")

    def around(self, center: float, share: float) -> Range:
        """The part of this range, `share` of its width, that is as centred as the ends allow."""
        scale = math.log if self.log else float
        back = math.exp if self.log else float
        low, high = scale(self.low), scale(self.high)
        width = (high - low) * share
        begin = min(max(scale(center) - width / 2, low), high - width)
        narrow = back(begin), back(begin + width)
        # Rounding must not lead out of the range.
        ends = max(self.low, narrow[0]), min(self.high, narrow[1])
        if self.integer:
            ends = float(math.floor(ends[0])), float(math.ceil(ends[1]))
        return Range(*ends, self.log, self.integer)


Space = Mapping[str, Any]  # a Range or a sequence; mypy joins a literal of both to `object`


class StopEarly(Exception):
    """Raised by `Attempt.report` on every rank if a trial is not worth continuing."""


class Attempt:
    """One trial, on every rank: its values, and whether to continue."""

    def __init__(self, trial: Any, params: dict[str, Any], number: int, round_: int) -> None:
        self._trial = trial  # rank 0's
        self.params = params
        self.number = number
        self.round = round_

    def report(self, step: int, value: float) -> None:
        """Report progress; all ranks together. Rank 0's value is used. May raise `StopEarly`."""
        stop = False
        if self._trial is not None:
            self._trial.report(value, step)
            stop = self._trial.should_prune()
        if _from_rank_0(stop):
            raise StopEarly


@dataclass(frozen=True)
class Found:
    """The best trial, on every rank; `study` is Optuna's, with all of them, on rank 0."""

    params: dict[str, Any]
    value: float
    study: Any = None


def coarse_to_fine(
    objective: Callable[[Attempt], float],
    space: Space,
    *,
    rounds: Sequence[int] = (12, 8, 8),
    shrink: float = 0.3,
    maximize: bool = False,
    seed: int = 0,
    pruner: Any = None,
    storage: str | None = None,
    name: str = "sweep",
) -> Found:
    """Search for the values with the best objective; all ranks call it together.

    Parameters
    ----------
    objective : callable
        Trains with `attempt.params` on all ranks, and returns the objective; rank 0's counts.
        It may raise `StopEarly`, on all ranks; NaN and infinities are failures.
    space : Space
        Name -> `Range` or a list of choices. Choices stay as they are in all rounds.
    rounds : sequence of int, optional
        Trials in each round. The first draws at random from all of the space, later ones with
        Optuna's TPE sampler from ranges that are `shrink` times as wide, around the best.
    seed : int, optional
        Of the samplers.
    pruner : BasePruner, optional
        Of Optuna; default: its median pruner.
    storage : str, optional
        Of Optuna, such as ``sqlite:///sweep.db``; default: in memory. An existing study of this
        `name` continues: its trials count for the best one.

    Raises
    ------
    ModuleNotFoundError : Optuna is not installed on rank 0, which needs it.
    RuntimeError : no trial had a result. If Optuna refuses the storage or the pruner, rank 0 raises
        its error, and the others one with its text.
    """
    if not 0 < shrink < 1:
        raise ValueError(f"shrink must be between 0 and 1, not {shrink}")
    optuna, study = open_study("coarse_to_fine", name, storage, maximize, pruner)
    number = 0
    begun = 0 if study is None else len(study.trials)  # the seed again would give them again
    for round_, count in enumerate(rounds):
        ranges = {}
        if study is not None:
            narrow = _narrowed(space, _best(study), shrink**round_)
            ranges = distributions(optuna, narrow)
            samplers = optuna.samplers
            study.sampler = (samplers.TPESampler if round_ else samplers.RandomSampler)(
                seed=seed + round_ + begun
            )
        for _ in range(count):
            _try(objective, optuna, study, ranges, number, round_)
            number += 1
    best = _best(study) if study is not None else None
    found = _from_rank_0(None if best is None else (dict(best.params), float(best.value)))
    if found is None:
        raise RuntimeError(f"none of {number} trials had a result")
    return Found(params=found[0], value=found[1], study=study)


def open_study(
    caller: str,
    name: str,
    storage: Any,
    maximize: bool,
    pruner: Any = None,
    sampler: Any = None,
) -> tuple[Any, Any]:
    """Optuna and a study on rank 0, None on other ranks; all ranks call it together.

    `pruner` is Optuna's, or a function that makes one from the module; default: the median pruner.

    Raises what `coarse_to_fine` raises.
    """
    optuna: Any = None
    study: Any = None
    failure: Exception | None = None
    problem = None
    if _rank() == 0:
        try:
            optuna = importlib.import_module("optuna")
            made = pruner(optuna) if callable(pruner) else pruner
            study = optuna.create_study(
                study_name=name,
                storage=storage,
                load_if_exists=storage is not None,
                direction="maximize" if maximize else "minimize",
                pruner=made or optuna.pruners.MedianPruner(),
                sampler=sampler(optuna) if callable(sampler) else sampler,
            )
        except Exception as failed:
            missing = isinstance(failed, ModuleNotFoundError) and failed.name == "optuna"
            failure, problem = failed, "" if missing else f"{type(failed).__name__}: {failed}"
    problem = _from_rank_0(problem)
    if problem == "":
        why = f"{caller} needs Optuna; pip install optuna"
        raise ModuleNotFoundError(why, name="optuna") from None
    if problem is not None:
        raise failure or RuntimeError(f"rank 0: {problem}")
    return optuna, study


def _try(
    objective: Callable[[Attempt], float],
    optuna: Any,
    study: Any,
    distributions: dict[str, Any],
    number: int,
    round_: int,
) -> None:
    trial = None if study is None else study.ask(distributions)
    params = _from_rank_0(None if trial is None else dict(trial.params))
    attempt = Attempt(trial, params, number, round_)
    value, stopped = math.nan, False
    try:
        value = float(objective(attempt))
    except StopEarly:
        stopped = True
    stopped = any(_of_all(stopped))  # a rank may have raised it by itself
    if study is None:
        return
    states = optuna.trial.TrialState
    if stopped:
        study.tell(trial, state=states.PRUNED)
    elif not math.isfinite(value):
        study.tell(trial, state=states.FAIL)
    else:
        study.tell(trial, value)


def _best(study: Any) -> Any:
    try:
        return study.best_trial
    except ValueError:  # there is none yet
        return None


def _narrowed(space: Space, best: Any, share: float) -> Space:
    if best is None:
        return space

    def narrow(name: str, each: Range | Sequence[Any]) -> Range | Sequence[Any]:
        known = isinstance(each, Range) and name in best.params
        return each.around(best.params[name], share) if known else each  # type: ignore[union-attr]

    return {name: narrow(name, each) for name, each in space.items()} if share < 1 else space


def distributions(optuna: Any, space: Space) -> dict[str, Any]:
    """Optuna's distributions of a space."""
    made = {}
    for name, each in space.items():
        if not isinstance(each, Range):
            made[name] = optuna.distributions.CategoricalDistribution(list(each))
        elif each.integer:
            made[name] = optuna.distributions.IntDistribution(
                int(each.low), int(each.high), log=each.log
            )
        else:
            made[name] = optuna.distributions.FloatDistribution(each.low, each.high, log=each.log)
    return made


def _rank() -> int:
    return hvd.rank() if hvd.is_initialized() else 0


def _from_rank_0(value: Any) -> Any:
    return hvd.broadcast_object(value, name="sweep") if hvd.is_initialized() else value


def _of_all(value: Any) -> list[Any]:
    return hvd.allgather_object(value, name="sweep.all") if hvd.is_initialized() else [value]
