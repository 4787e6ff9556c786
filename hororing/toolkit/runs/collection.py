"""Run records in a folder as one table: filter, sort, group, and the weight of each parameter."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hororing.toolkit.tracking.adapters import Tracker
from hororing.toolkit.tracking.comparison import flat
from hororing.toolkit.tracking.read import Run, read_run

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_TERM = re.compile(r"\s*([^<>=!]+?)\s*(<=|>=|!=|==|=|<|>)\s*(.*?)\s*")
# Columns of every run, beside its hyper-parameters and metrics.
ABOUT = ("name", "status", "seed", "ranks", "host", "time", "seconds")
_QUARTERS = 4


@dataclass(frozen=True)
class Row:
    """One run. `values` has its hyper-parameters by dotted names, metrics (the best), and `ABOUT`.

    The last value of a metric is `<metric>.last`.
    """

    run: Run
    values: dict[str, Any]


class Collection:
    """Some runs.

    Attributes
    ----------
    rows : list of Row
        One for each run.
    params : list of str
        The hyper-parameters that differ.
    metrics : list of str
        Their names.
    unreadable : dict
        Path -> why, for files that are no records.
    """

    def __init__(self, rows: list[Row], maximize: Iterable[str] = ()) -> None:
        self.rows = rows
        self.unreadable: dict[str, str] = {}
        self.metrics = list(dict.fromkeys(name for row in rows for name in row.run.metrics))
        named = (name for row in rows for name in row.run.head.get("maximize", []))
        self.maximize = {*maximize, *named}
        configs = [flat(row.run.config) for row in rows]
        names = dict.fromkeys(name for config in configs for name in config)
        self.params = [
            name for name in names if len({repr(config.get(name)) for config in configs}) > 1
        ]

    def where(self, *terms: str) -> Collection:
        """Those for which all terms hold, such as ``lr<0.1`` or ``optimizer.name=adam``.

        A text without an operator is a part of the name. A run that lacks a value does not match,
        except for ``!=``.

        Raises
        ------
        ValueError : no run has such a value.
        """
        rows = self.rows
        for term in terms:
            found = _TERM.fullmatch(term)
            if found is None:
                rows = [row for row in rows if term in row.run.name]
                continue
            name, sign, text = found[1], found[2].replace("==", "="), found[3]
            self.check(name)
            holds = _OPERATORS[sign]
            rows = [row for row in rows if _compared(row.values.get(name), holds, sign, text)]
        return self._of(rows)

    def check(self, name: str) -> str:
        """`name`, or ValueError unless some run has a value of this name."""
        if self.rows and not any(name in row.values for row in self.rows):
            known = [*self.params, *self.metrics, *ABOUT]
            raise ValueError(f"no run has {name!r}; there are {', '.join(known)}")
        return name

    def sorted(self, name: str, down: bool = False) -> Collection:
        """By a value, ascending; runs without one come last."""
        self.check(name)
        having = [row for row in self.rows if _place(row.values.get(name)) is not None]
        lacking = [row for row in self.rows if _place(row.values.get(name)) is None]
        having.sort(key=lambda row: _place(row.values[name]), reverse=down)  # type: ignore[arg-type,return-value]
        return self._of(having + lacking)

    def groups(self, name: str) -> dict[Any, Collection]:
        """The runs of each value of `name`."""
        self.check(name)
        found: defaultdict[Any, list[Row]] = defaultdict(list)
        for row in self.rows:
            value = row.values.get(name)
            found[value if isinstance(value, bool | int | float | str) else str(value)].append(row)
        return {value: self._of(rows) for value, rows in found.items()}

    def best(self, metric: str) -> Row | None:
        """The run with the best value of a metric; None: none has a number."""
        ordered = self.sorted(metric, metric in self.maximize).rows
        return ordered[0] if ordered and _is_number(ordered[0].values.get(metric)) else None

    def records(self, metric: str) -> Collection:
        """The runs that were better than all before them, in the order of their begin."""
        sign = -1.0 if metric in self.maximize else 1.0
        best, found = math.inf, []
        for row in sorted(self.rows, key=lambda row: float(row.values.get("time") or 0)):
            value: Any = row.values.get(metric)
            if _is_number(value) and sign * value < best:
                best = sign * value
                found.append(row)
        return self._of(found)

    def weights(self, metric: str) -> dict[str, float]:
        """How much of the order of the runs each hyper-parameter explains, from 0 to 1.

        The share of the variance of the runs' ranks in `metric` between the groups of a
        parameter's values (eta squared of the Kruskal-Wallis test); more than four numbers count
        by quarters. It sees parameters one by one. Corrected for the number of groups, as
        epsilon squared.
        """
        rows = [row for row in self.rows if _is_number(row.values.get(metric))]
        if len(rows) < 2 * _QUARTERS:
            return {}
        values = np.array([row.values[metric] for row in rows])
        ranks = np.empty(len(rows))
        ranks[np.argsort(values)] = np.arange(len(rows))
        for value in np.unique(values):  # ties share their mean
            ranks[values == value] = ranks[values == value].mean()
        total = float(((ranks - ranks.mean()) ** 2).sum())
        found = {}
        for name in self.params if total else ():
            labels = _labels([row.values.get(name) for row in rows])
            count = len(set(labels))
            if not 1 < count <= len(rows) // 2:
                continue
            within = sum(
                float(((part - part.mean()) ** 2).sum())
                for label in set(labels)
                for part in [ranks[np.array(labels) == label]]
            )
            free = len(rows) - count
            found[name] = max(0.0, 1 - within / free / (total / (len(rows) - 1)))
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def _of(self, rows: list[Row]) -> Collection:
        return Collection(rows, self.maximize)


def load(folder: str | os.PathLike[str], maximize: Iterable[str] = ()) -> Collection:
    """Read all records in a folder and those below it; files that are none are listed.

    `maximize`: metrics of which the largest value is the best, beside those that runs name.

    Raises
    ------
    FileNotFoundError : no such folder, or no record in it.
    """
    paths = sorted(Path(folder).rglob("*.jsonl")) if Path(folder).is_dir() else [Path(folder)]
    rows, unreadable = [], {}
    runs = []
    for path in paths:
        try:
            runs.append(read_run(path))
        except (OSError, ValueError) as error:
            unreadable[str(path)] = str(error)
    if not runs:
        reason = next(iter(unreadable.values()), "there is no file *.jsonl")
        raise FileNotFoundError(f"no run record in {os.fspath(folder)!r}: {reason}")
    upwards = {*maximize, *(name for run in runs for name in run.head.get("maximize", []))}
    rows = [_row(run, upwards) for run in runs]
    found = Collection(rows, upwards)
    found.unreadable = unreadable
    for name in maximize:
        if name not in found.metrics:
            raise ValueError(f"maximize: no run has a metric {name!r}; there are {found.metrics}")
    return found


def export(runs: Iterable[Run], trackers: Iterable[Tracker]) -> int:
    """Write runs to other trackers, such as ``[TensorBoard("logs"), MLflow()]``; return how many.

    Raises
    ------
    ModuleNotFoundError : a tracker is not installed.
    """
    count = 0
    for run in runs:
        for tracker in trackers:
            head = {"config": {}, "seed": None, **run.head, "name": run.name}
            if not tracker.begin(head):
                raise ModuleNotFoundError(tracker.why_not())
            steps: defaultdict[int, dict[str, float]] = defaultdict(dict)
            for name, metric in run.metrics.items():
                for step, value in zip(metric.steps, metric.values, strict=True):
                    steps[step][name] = value
            for step in sorted(steps):
                tracker.log(step, steps[step])
            tracker.end("completed" if run.status == "completed" else "failed")
        count += 1
    return count


def _row(run: Run, maximize: set[str]) -> Row:
    values: dict[str, Any] = {
        "name": run.name,
        "status": run.status,
        **{name: run.head.get(name) for name in ("seed", "ranks", "host", "time")},
        "seconds": run.seconds,
        **flat(run.config),
    }
    for name, metric in run.metrics.items():
        values[name] = metric.best(name in maximize)[0]
        values[f"{name}.last"] = metric.last[0]
    return Row(run, values)


def _compared(value: Any, holds: Callable[[Any, Any], bool], sign: str, text: str) -> bool:
    if value is None:
        return sign == "!="
    if _is_number(value) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return holds(value, float(text))
        return sign == "!="
    return holds(str(value), text)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and value == value


def _place(value: Any) -> tuple[bool, Any] | None:
    """Where a value is in an order of numbers and, behind them, texts."""
    if value is None or value != value:
        return None
    return (False, value) if _is_number(value) else (True, str(value))


def _labels(values: list[Any]) -> list[Any]:
    """The group of each value: itself, or the quarter in which a number is."""
    if len({repr(value) for value in values}) <= _QUARTERS or not all(map(_is_number, values)):
        return [repr(value) for value in values]
    inner = np.linspace(0, 1, _QUARTERS + 1)[1:-1]
    bounds = np.quantile(np.array(values, float), inner)
    return [int(np.searchsorted(bounds, value, side="right")) for value in values]
