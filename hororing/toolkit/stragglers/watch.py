"""Stragglers of the steps that are being made now."""

from __future__ import annotations

import os
import tempfile
from types import TracebackType

import hororing.numpy as hvd
from hororing import timeline
from hororing.toolkit.stragglers.arrivals import read_timeline
from hororing.toolkit.stragglers.diagnosis import Diagnosis, diagnose


class StragglerWatch:
    """Records some steps, and tells every rank who was late in them.

    All ranks enter and leave it together; nothing is recorded outside of it. It uses the timeline,
    so one that is being written (HORORING_TIMELINE) must be read afterwards instead.

    Parameters
    ----------
    tolerance_s : as in `diagnose`.

    Raises
    ------
    ValueError : a timeline is being written already; too few steps were made (on every rank).

    Examples
    --------
    >>> with StragglerWatch() as watch:
    ...     for batch in itertools.islice(loader, 50):
    ...         train(batch)
    >>> if hvd.rank() == 0:
    ...     print(watch.diagnosis)
    """

    def __init__(self, tolerance_s: float | None = None) -> None:
        self.tolerance_s = tolerance_s
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._diagnosis: Diagnosis | None = None

    @property
    def diagnosis(self) -> Diagnosis:
        """What was found; RuntimeError before the end."""
        if self._diagnosis is None:
            raise RuntimeError("the steps to be watched have not ended")
        return self._diagnosis

    def __enter__(self) -> StragglerWatch:
        busy = None
        if hvd.rank() == 0:
            if timeline.enabled():
                busy = "a timeline is being written: see `python -m hororing stragglers` for it"
            else:
                self._folder = tempfile.TemporaryDirectory(prefix="hororing-")
                hvd.start_timeline(os.path.join(self._folder.name, "timeline.json"))
        busy = hvd.broadcast_object(busy, name="stragglers.watch")
        if busy:
            raise ValueError(busy)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        found: Diagnosis | str | None = None
        try:
            if error is None:  # else peers may not come
                hvd.broadcast_object(None, name="stragglers.watch")  # members of all sets are done
            if self._folder is not None:
                hvd.stop_timeline()
                recording = read_timeline(os.path.join(self._folder.name, "timeline.json"))
                recording.collectives[:] = [
                    each for each in recording.collectives if "stragglers.watch" not in each.name
                ]
                found = diagnose(recording, self.tolerance_s)
        except ValueError as why:
            found = str(why)
        finally:
            if self._folder is not None:
                self._folder.cleanup()
                self._folder = None
        if error is not None:
            return
        found = hvd.broadcast_object(found, name="stragglers.watch")
        if isinstance(found, str):
            raise ValueError(found)
        self._diagnosis = found
