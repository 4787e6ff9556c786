"""Reads the record of a run, also of one that was killed or is still running."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Metric:
    """The values of one metric, in the order in which they were written."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def last(self) -> tuple[float, int]:
        """Value and step."""
        return self.values[-1], self.steps[-1]

    def best(self, maximize: bool) -> tuple[float, int]:
        """The largest or smallest value, and its first step; NaN is never best unless alone."""
        pairs = [(v, s) for v, s in zip(self.values, self.steps, strict=True) if v == v]
        if not pairs:
            return self.last
        value = (max if maximize else min)(value for value, _ in pairs)
        return next(pair for pair in pairs if pair[0] == value)


@dataclass(frozen=True)
class Run:
    """The contents of a file. `head` is the first line; if resumed, that of the latest start."""

    path: Path
    head: dict[str, Any]
    metrics: dict[str, Metric]
    notes: list[str]
    status: str  # "completed", "failed", "pruned"; "unfinished": killed, or still running
    starts: int  # 1 + number of resumptions
    torn: int  # lines cut short by a kill
    seconds: float = 0.0  # from the latest start to the last line

    @property
    def name(self) -> str:
        """The run's, without `.jsonl`."""
        return str(self.head.get("name", self.path.stem))

    @property
    def config(self) -> dict[str, Any]:
        """Hyper-parameters."""
        return dict(self.head.get("config", {}))


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a record.

    Raises
    ------
    OSError, ValueError : no such file; not the record of a run.
    """
    lines, torn = _lines(Path(path).read_bytes().splitlines())
    heads = [line for line in lines if line.get("kind") == "run"]
    if not heads:
        raise ValueError(f"{os.fspath(path)!r} is not the record of a run")
    metrics: dict[str, Metric] = {}
    status = "unfinished"
    for line in lines:
        if line["kind"] == "metrics":
            for name, value in line["values"].items():
                metric = metrics.setdefault(name, Metric())
                metric.steps.append(line["step"])
                metric.values.append(float(value))
        elif line["kind"] in ("run", "end"):
            status = line.get("status", "unfinished")
    notes = [line["text"] for line in lines if line["kind"] == "note"]
    timed = (line for line in reversed(lines) if line["kind"] in ("metrics", "end"))
    seconds = next((line.get("seconds", 0.0) for line in timed), 0.0)
    return Run(Path(path), heads[-1], metrics, notes, status, len(heads), torn, seconds)


def _lines(texts: list[bytes]) -> tuple[list[dict[str, Any]], int]:
    try:  # all at once takes a third of the time
        whole = json.loads(b"[" + b",".join(texts) + b"]")
        if len(whole) == len(texts):
            return [line for line in whole if isinstance(line, dict) and "kind" in line], 0
    except ValueError:
        pass
    found, torn = [], 0
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:
            torn += 1
            continue
        if isinstance(line, dict) and "kind" in line:
            found.append(line)
    return found, torn
