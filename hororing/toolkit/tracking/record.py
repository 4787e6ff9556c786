"""The record of one run: a file of JSON lines that rank 0 appends to.

The first line is the run (configuration, versions, hosts, commit, seed), then comes a line for
every set of metrics, and one for the end. Each line is one unbuffered write to the file: a run that
is killed leaves everything up to its last metrics.
"""

from __future__ import annotations

import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle

import hororing.numpy as hvd
from hororing.extension import show
from hororing.toolkit.tracking.adapters import Tracker
from hororing.toolkit.tracking.circumstances import circumstances
from hororing.toolkit.tracking.run_file import RunFile


class RunRecord:
    """Records a run in a file. Every rank creates one, rank 0 writes.

    After `init`, all ranks must call the methods together. Without `init`, the record is that of
    this process.

    Parameters
    ----------
    folder : str or PathLike
        Of the file, `<name>.jsonl`; created if missing.
    config : dict, optional
        Hyper-parameters, by name; values may be nested dicts and lists. Rank 0's are used.
    name : str, optional
        Default: the time and a random number. If the file exists, the run is resumed in it.
    seed : int, optional
        Of the run's random numbers.
    maximize : iterable of str, optional
        Metrics whose largest value is the best; for others the smallest is.
    trackers : iterable of Tracker, optional
        Others that get the same on rank 0: `TensorBoard(...)`, `WeightsAndBiases(...)`,
        `MLflow(...)`. Trackers that are not installed are left out with a warning.

    Attributes
    ----------
    path : Path
        Of the file, on every rank.

    Raises
    ------
    OSError : rank 0 cannot write there (on every rank).
    ModuleNotFoundError : a tracker that is `required` is not installed (on every rank).
    Exception : what a tracker raises when it begins; a RuntimeError with its text on other ranks,
        if it cannot be copied.

    Examples
    --------
    >>> with RunRecord("runs", config=vars(args), seed=args.seed, maximize=["accuracy"]) as run:
    ...     for epoch in range(args.epochs):
    ...         loss, accuracy = train_and_test(epoch)
    ...         run.log(epoch, {"loss": loss, "accuracy": accuracy})
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        config: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        seed: int | None = None,
        maximize: Iterable[str] = (),
        trackers: Iterable[Tracker] = (),
    ) -> None:
        self._trackers: list[Tracker] = []
        self._file: RunFile | None = None
        self._closed = False
        self.last: dict[str, float] = {}  # the metrics of the latest `log`, reduced
        error: Exception | None = None
        path = ""
        if _rank() == 0:
            name = name or f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
            path = os.path.join(os.path.abspath(folder), f"{name}.jsonl")
            try:
                run: dict[str, Any] = {"name": name, "config": dict(config or {}), "seed": seed}
                run |= {"maximize": list(maximize), **circumstances()}
                self._file = RunFile.of(folder, name)
                self._file.begin(run)
                for tracker in trackers:
                    if tracker.begin(run):
                        self._trackers.append(tracker)
                    else:
                        warnings.warn(tracker.why_not(), stacklevel=2)
            except Exception as failed:
                error = failed
        path, seen = _from_rank_0((path, _portable(error)))
        if seen is not None:
            self.close("failed")
            raise seen if error is None else error
        self.path = Path(path)

    def log(self, step: int, metrics: Mapping[str, Any], weight: float = 1.0) -> dict[str, float]:
        """Add metrics, averaged over the ranks, and return these averages.

        Parameters
        ----------
        step : int
            A number that grows; rank 0's counts.
        metrics : dict
            Numbers, or what `float` takes; the same names on every rank.
        weight : float, optional
            Of this rank, such as the number of its samples; finite, 0 at least. The averages
            are sum(weight * value) / sum(weight), in float64. A rank of weight 0 adds nothing,
            whatever its values are; where all weigh 0, the averages are NaN.

        Raises
        ------
        ValueError : ranks have metrics of different names, something that is no number, or weights
            out of range, or the record is closed; on every rank.
        """
        values: dict[str, float] = {}
        weighs, failure = 0.0, ""
        try:
            if self._closed:
                raise ValueError("the run's record is closed")
            _number("step", step, int)
            weighs = _number("weight", weight)
            if not isinstance(metrics, Mapping):
                raise ValueError(f"metrics must be a dict, not {metrics!r:.80}")
            values = {name: _number(f"metric {name!r}", each) for name, each in metrics.items()}
        except ValueError as error:
            failure = str(error)
        self.last = _averaged(_gathered((values, weighs, failure)))
        show(step, **self.last)
        if _rank() == 0:
            self._opened().log(int(step), self.last)
            for tracker in self._trackers:
                tracker.log(int(step), self.last)
        return self.last

    def note(self, text: str) -> None:
        """Add a line of text of rank 0; other ranks need not call it."""
        if _rank() == 0:
            self._opened().note(text)

    def close(self, status: str = "completed") -> None:
        """End the run; once. Later calls do nothing."""
        if self._file is not None:
            self._file.close(status)
        self._closed = True
        while self._trackers:
            self._trackers.pop(0).end(status)

    def _opened(self) -> RunFile:
        if self._closed:
            raise ValueError("the run's record is closed")
        if self._file is None:  # in an elastic job: another process was rank 0 at the beginning
            self._file = RunFile(self.path)
        return self._file

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        failed = error is not None
        if isinstance(error, SystemExit):
            failed = error.code not in (None, 0)
        if failed and self._file is not None and not self._closed:
            self.note(f"{type(error).__name__}: {error}")
        self.close("failed" if failed else "completed")


def _portable(error: Exception | None) -> Exception | None:
    """Return `error`, or one with its text, if a copy of it cannot be sent to other ranks."""
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        return RuntimeError(f"rank 0: {type(error).__name__}: {error}")
    return error


def _rank() -> int:
    return hvd.rank() if hvd.is_initialized() else 0


def _from_rank_0(mine: Any) -> Any:
    """Rank 0's, on every rank."""
    if not hvd.is_initialized():
        return mine
    return hvd.broadcast_object(mine, name="tracking.run")


def _gathered(mine: Any) -> list[Any]:
    if not hvd.is_initialized():
        return [mine]
    return list(hvd.allgather_object(mine, name="tracking.metrics"))


def _number(what: str, value: Any, kind: Callable[[Any], float] = float) -> float:
    try:
        return kind(value)
    except Exception as error:  # any error of converting a framework's tensor
        raise ValueError(f"{what} must be one number, not {value!r:.80}: {error}") from None


def _averaged(ranks: list[tuple[dict[str, float], float, str]]) -> dict[str, float]:
    for rank, (_, _, failure) in enumerate(ranks):
        if failure:
            raise ValueError(f"rank {rank}: {failure}")
    names = ranks[0][0]
    for rank, (values, weight, _) in enumerate(ranks):
        if set(values) != set(names):
            raise ValueError(
                f"metrics differ - rank 0: {sorted(names)}; rank {rank}: {sorted(values)}. Every "
                "rank must log the same ones"
            )
        if not 0 <= weight < float("inf"):
            raise ValueError(f"rank {rank}: weight must be finite and at least 0, not {weight}")
    counted = [(values, weight) for values, weight, _ in ranks if weight > 0]
    total = sum(weight for _, weight in counted)
    return {
        name: sum(values[name] * weight for values, weight in counted) / total
        if total
        else float("nan")
        for name in names
    }
