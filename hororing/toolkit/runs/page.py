"""The page: one file with its data, scripts and styles; it loads nothing."""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

from hororing.toolkit.runs.collection import Collection
from hororing.toolkit.tracking.read import Metric

_MOST_POINTS = 200  # of a curve


def page(runs: Collection, metric: str | None = None, notes: bool = False) -> str:
    """The HTML page of some runs.

    Parameters
    ----------
    metric : str, optional
        Shown first; default: the first one.
    notes : bool, optional
        Whether it can add notes, as `python -m hororing runs --serve` does.
    """
    data = {
        "params": runs.params,
        "metrics": runs.metrics,
        "maximize": sorted(runs.maximize),
        "metric": metric or next(iter(runs.metrics), ""),
        "weights": {name: runs.weights(name) for name in runs.metrics},
        "takesNotes": notes,
        "runs": [
            {
                "name": row.run.name,
                "values": {name: _number(value) for name, value in row.values.items()},
                "curves": {name: _curve(each) for name, each in row.run.metrics.items()},
                "notes": row.run.notes,
            }
            for row in runs.rows
        ],
    }
    # In a script element, only these begin markup.
    text = json.dumps(data, default=str).replace("<", "\\u003c").replace("&", "\\u0026")
    template = resources.files(__package__).joinpath("page.html").read_text("utf-8")
    return template.replace("{{data}}", text)


def _curve(metric: Metric) -> list[list[Any]]:
    """Steps and values, at most `_MOST_POINTS`; the last one is always there."""
    stride = max(1, math.ceil(len(metric.steps) / _MOST_POINTS))
    steps, values = metric.steps[::stride], metric.values[::stride]
    if steps and steps[-1] != metric.steps[-1]:
        steps, values = [*steps, metric.steps[-1]], [*values, metric.values[-1]]
    return [steps, [_number(value) for value in values]]


def _number(value: Any) -> Any:
    """A float that JSON lacks becomes text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
