"""The record of a run (hororing.toolkit.tracking) as a callback of ``model.fit``."""

from __future__ import annotations

from typing import Any

import keras

from hororing.toolkit.tracking import RunRecord


class RunRecordCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Logs the metrics of ``fit`` at the end of every epoch, averaged over the ranks.

    All ranks need it, since averaging takes all of them. The record stays open, so that more can
    be logged afterwards: close it, or use it in a ``with`` statement.

    Parameters
    ----------
    record : RunRecord
        `RunRecord`.
    weight : float, optional
        Of this rank in the averages, such as its number of samples.

    Examples
    --------
    >>> with RunRecord("runs", config=config) as record:
    ...     model.fit(x, y, callbacks=[RunRecordCallback(record)])
    """

    def __init__(self, record: RunRecord, weight: float = 1.0) -> None:
        super().__init__()
        self.record = record
        self.weight = weight

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the epoch."""
        if logs:
            self.record.log(epoch, logs, weight=self.weight)
