"""``python -m hororing runs FOLDER``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from hororing.toolkit.runs import server
from hororing.toolkit.runs.collection import Collection, export, load
from hororing.toolkit.runs.page import page
from hororing.toolkit.tracking.adapters import MLflow, TensorBoard, Tracker
from hororing.toolkit.tracking.run_file import RunFile

_MOST_COLUMNS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("folder", help="of records that RunRecord or search wrote")
    parser.add_argument(
        "--where", action="append", default=[], metavar="TERM",
        help="only runs with lr<0.1, optimizer.name=adam, status!=failed, ...; may be repeated",
    )  # fmt: skip
    parser.add_argument("--metric", help="that decides what is best; default: the first one")
    parser.add_argument(
        "--maximize", action="append", default=[], metavar="METRIC", help="the larger the better"
    )
    parser.add_argument("--sort", metavar="NAME", help="default: the metric, the best first")
    parser.add_argument("--reverse", action="store_true", help="sort the other way")
    parser.add_argument("--group", metavar="NAME", help="a row for each value of this name")
    parser.add_argument(
        "--best-so-far", action="store_true", help="only runs better than all before them"
    )
    parser.add_argument("--limit", type=int, default=20, help="of rows; 0: none (default: 20)")
    parser.add_argument("--html", metavar="FILE", help="write a page that needs no network")
    parser.add_argument(
        "--serve", type=int, nargs="?", const=0, metavar="PORT",
        help="serve the page to this machine until Ctrl-C, and accept notes; 0: any port",
    )  # fmt: skip
    parser.add_argument("--note", nargs=2, metavar=("RUN", "TEXT"), help="add a note to a run")
    parser.add_argument("--tensorboard", metavar="FOLDER", help="write the runs for TensorBoard")
    parser.add_argument("--mlflow", action="store_true", help="write the runs to MLflow")


def run(chosen: argparse.Namespace) -> int:
    """Print the table, and do what else is asked for. 1: it cannot be done."""
    try:
        return _run(chosen)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1


def _run(chosen: argparse.Namespace) -> int:
    every = load(chosen.folder, chosen.maximize)
    for path, why in every.unreadable.items():
        print(f"{path} is left out: {why}", file=sys.stderr)
    if chosen.note:
        add_note(every, *chosen.note)
        return 0
    runs = every.where(*chosen.where)
    metric = chosen.metric or next(iter(every.metrics), None)
    if metric is not None and metric not in every.metrics:
        raise ValueError(f"--metric: no run has {metric!r}; there are {', '.join(every.metrics)}")
    if chosen.best_so_far and metric is not None:
        runs = runs.records(metric)
    else:
        by = chosen.sort or metric or "name"
        runs = runs.sorted(by, (by in runs.maximize) != chosen.reverse)
    print(_grouped(runs, chosen.group, metric) if chosen.group else table(runs, chosen.limit))
    if metric is not None and runs.rows:
        print(_summary(runs, metric))
    trackers: list[Tracker] = [TensorBoard(chosen.tensorboard)] if chosen.tensorboard else []
    if chosen.mlflow:
        trackers.append(MLflow())
    if trackers:
        print(f"exported {export((row.run for row in runs.rows), trackers)} runs")
    if chosen.html:
        Path(chosen.html).write_text(page(runs, metric), "utf-8")
        print(f"wrote {os.path.abspath(chosen.html)}")
    if chosen.serve is not None:
        server.serve(
            lambda: page(load(chosen.folder, chosen.maximize).where(*chosen.where), metric, True),
            lambda name, text: add_note(load(chosen.folder), name, text),
            chosen.serve,
        )
    return 0


def add_note(runs: Collection, name: str, text: str) -> None:
    """Append a note to a run's record; ValueError if there is no such run."""
    found = [row.run for row in runs.rows if row.run.name == name]
    if not found:
        raise ValueError(f"there is no run {name!r}")
    file = RunFile(found[0].path)
    file.note(text)
    file.leave()


def table(runs: Collection, limit: int) -> str:
    """The first runs: hyper-parameters that differ, the best values of metrics, and the status."""
    shown = runs.rows[:limit] if limit else runs.rows
    params, metrics = runs.params[:_MOST_COLUMNS], runs.metrics[:_MOST_COLUMNS]
    rows = [["", "status", *params, *metrics]]
    for row in shown:
        cells = [_text(row.values.get(name)) for name in ("status", *params, *metrics)]
        rows.append([row.run.name, *cells])
    lines = aligned(rows)
    if len(shown) < len(runs.rows):
        lines.append(f"... {len(runs.rows) - len(shown)} more runs (--limit)")
    hidden = runs.params[_MOST_COLUMNS:]
    if hidden:
        lines.append(f"hyper-parameters not shown: {', '.join(hidden)}")
    return "\n".join(lines)


def _grouped(runs: Collection, name: str, metric: str | None) -> str:
    if metric is None:
        raise ValueError("--group: no run has a metric")
    rows = [[name, "runs", f"best {metric}", f"median {metric}", "best run"]]
    groups = runs.groups(name)
    for value, group in groups.items():
        best, ordered = group.best(metric), group.sorted(metric).rows
        values = [row.values[metric] for row in ordered if row.values.get(metric) is not None]
        middle = values[len(values) // 2] if values else None
        rows.append([
            _text(value), str(len(group.rows)), _text(best and best.values[metric]),
            _text(middle), best.run.name if best else "-",
        ])  # fmt: skip
    return "\n".join(aligned(rows))


def _summary(runs: Collection, metric: str) -> str:
    best = runs.best(metric)
    if best is None:
        return f"no run has a number for {metric}"
    lines = [
        f"best {metric} of {len(runs.rows)} runs: {_text(best.values[metric])}, {best.run.name}"
    ]
    lines[0] += "".join(f"; {name}={_text(best.values.get(name))}" for name in runs.params)
    weights = runs.weights(metric)
    if weights:
        texts = [f"{name} {share:.0%}" for name, share in weights.items() if share >= 0.01]
        lines.append(f"the order in {metric} is explained by {', '.join(texts) or 'none of them'}")
    return "\n".join(lines)


def aligned(rows: list[list[str]]) -> list[str]:
    """Columns of text: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
