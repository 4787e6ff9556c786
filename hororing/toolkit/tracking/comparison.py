"""Compares runs: the hyper-parameters that differ, and the results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hororing.toolkit.tracking.read import Run, read_run


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted names."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


@dataclass(frozen=True)
class Comparison:
    """Values are per run, None where a run has none. `str()` is a table."""

    runs: list[Run]
    changed: dict[str, list[Any]]  # hyper-parameters that differ
    circumstances: dict[str, list[Any]]  # others: seed, ranks, versions, commit, settings
    last: dict[str, list[tuple[float, int] | None]]  # metrics: value and step
    best: dict[str, list[tuple[float, int] | None]]

    def __str__(self) -> str:
        def number(pair: tuple[float, int] | None) -> str:
            return "-" if pair is None else f"{pair[0]:.6g} @{pair[1]}"

        def text(value: Any) -> str:
            return "-" if value is None else str(value)

        rows = [["", *(run.name for run in self.runs)]]
        rows += [[name, *map(text, values)] for name, values in self.changed.items()]
        rows += [[f"({name})", *map(text, v)] for name, v in self.circumstances.items()]
        rows.append(["status", *(run.status for run in self.runs)])
        for name in self.last:
            rows.append([f"last {name}", *map(number, self.last[name])])
            rows.append([f"best {name}", *map(number, self.best[name])])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows
        ]
        if not self.changed:
            lines.append("no hyper-parameter differs")
        return "\n".join(lines)


def compare(runs: Iterable[Run], maximize: Iterable[str] = ()) -> Comparison:
    """Find what differs between runs.

    `maximize`: metrics of which the largest value is the best, beside those that the runs name
    (`RunRecord`); ValueError for one that no run has.

    >>> from hororing.toolkit.tracking import RunRecord
    >>> import pathlib
    >>> for rate in (0.1, 0.2):
    ...     with RunRecord("runs", config={"rate": rate}, name=f"rate {rate}") as run:
    ...         run.log(0, {"loss": 1 - rate})
    >>> runs = [read_run(path) for path in sorted(pathlib.Path("runs").iterdir())]
    >>> compare(runs).changed
    {'rate': [0.1, 0.2]}
    """
    runs, maximize = list(runs), list(maximize)
    upwards = {*maximize, *(name for run in runs for name in run.head.get("maximize", []))}
    configs = [flat(run.config) for run in runs]
    around = [_circumstances(run) for run in runs]
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    for name in maximize:
        if name not in names:
            raise ValueError(f"maximize: no run has a metric {name!r}; there are {names}")
    found = {name: [run.metrics.get(name) for run in runs] for name in names}
    return Comparison(
        runs=runs,
        changed=_differing(configs),
        circumstances=_differing(around),
        last={n: [m.last if m else None for m in metrics] for n, metrics in found.items()},
        best={
            n: [m.best(n in upwards) if m else None for m in metrics]
            for n, metrics in found.items()
        },
    )


def _circumstances(run: Run) -> dict[str, Any]:
    git = run.head.get("git") or {}
    return {
        "seed": run.head.get("seed"),
        "ranks": run.head.get("ranks"),
        "host": run.head.get("host"),
        "commit": (git.get("commit") or "none")[:12] + ("+" if git.get("changed") else ""),
        **flat(run.head.get("versions", {})),
        **run.head.get("settings", {}),
    }


def _differing(dicts: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for each in dicts for name in each)
    rows = {name: [each.get(name) for each in dicts] for name in names}
    # 1 and True, 1 and 1.0 are not the same hyper-parameter; JSON keeps them apart.
    return {
        name: values
        for name, values in rows.items()
        if any(repr(value) != repr(values[0]) for value in values)
        or any(name not in each for each in dicts)
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``python -m hororing compare``."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="files that RunRecord wrote")
    parser.add_argument(
        "--maximize", action="append", default=[], metavar="METRIC", help="the larger the better"
    )


def run(chosen: argparse.Namespace) -> int:
    """Print the table. 1: a file is no record, or no run has a metric to maximize."""
    try:
        runs = [read_run(path) for path in chosen.runs]
        for each in runs:
            if each.torn:
                print(f"{each.path}: {each.torn} unreadable lines are left out", file=sys.stderr)
        print(compare(runs, chosen.maximize))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
