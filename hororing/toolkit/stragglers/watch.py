"""Stragglers of the current steps."""

from __future__ import annotations

import os
import tempfile
import time
from types import TracebackType

import hororing.numpy as hvd
from hororing import extension
from hororing.toolkit.stragglers.arrivals import Recording, read_timeline
from hororing.toolkit.stragglers.diagnosis import Diagnosis, check_tolerance, diagnose

# How long the last events of all ranks may take to a timeline that goes on.
_ARRIVAL_S = 10.0
_BEGIN, _END = "stragglers.begin", "stragglers.end"


class StragglerWatch:
    """Records some steps, and reports on every rank which ranks were late in them.

    All ranks enter and leave it together. It uses the timeline. If one is being written
    (HORORING_TIMELINE), it continues and is read at the end; otherwise nothing is recorded outside
    the watch.

    Parameters
    ----------
    tolerance_s : float, optional
        As in `diagnose`.

    Raises
    ------
    ValueError : too few steps were made, or no timeline can be started (on every rank); a negative
        tolerance.

    Examples
    --------
    >>> with StragglerWatch() as watch:
    ...     for batch in itertools.islice(loader, 50):
    ...         train(batch)
    >>> if hvd.rank() == 0:
    ...     print(watch.diagnosis)
    """

    def __init__(self, tolerance_s: float | None = None) -> None:
        check_tolerance(tolerance_s)
        self.tolerance_s = tolerance_s
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._diagnosis: Diagnosis | None = None

    @property
    def diagnosis(self) -> Diagnosis:
        """The result; RuntimeError before the end."""
        if self._diagnosis is None:
            raise RuntimeError("the steps to be watched have not ended")
        return self._diagnosis

    def __enter__(self) -> StragglerWatch:
        failure = ""
        if hvd.rank() == 0 and not extension.timeline_is_on():
            try:
                self._folder = tempfile.TemporaryDirectory(prefix="hororing-")
                hvd.start_timeline(os.path.join(self._folder.name, "timeline.json"))
            except (OSError, ValueError) as error:
                failure = str(error)
                self._end()
        failure = hvd.broadcast_object(failure, name=_BEGIN)
        if failure:
            raise ValueError(failure)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        found: Diagnosis | str | None = None
        try:
            if error is None:  # else peers may not come
                hvd.broadcast_object(None, name=_END)  # members of all sets are done
            if self._folder is not None:
                hvd.stop_timeline()
            if hvd.rank() == 0 and error is None:
                found = diagnose(self._recorded(), self.tolerance_s)
        except (OSError, ValueError) as why:
            found = str(why)
        finally:
            self._end()
        if error is not None:
            return
        found = hvd.broadcast_object(found, name="stragglers.watch")
        if isinstance(found, str):
            raise ValueError(found)
        self._diagnosis = found

    def _end(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _recorded(self) -> Recording:
        """The steps between the broadcasts at the beginning and at the end."""
        deadline = time.monotonic() + _ARRIVAL_S
        while True:
            recording = read_timeline(extension.timeline_path())
            names = [each.name for each in recording.collectives]
            begin = max((i for i, name in enumerate(names) if name.startswith(_BEGIN)), default=-1)
            ends = [i for i, name in enumerate(names) if name.startswith(_END) and i > begin]
            if ends or self._folder is not None or time.monotonic() > deadline:
                break
            time.sleep(0.2)  # events travel a few times a second
        recording.collectives[:] = recording.collectives[begin + 1 : min(ends, default=len(names))]
        return recording
