"""The logger "hororing", and the thread that brings the core's messages to it.

Every line names its rank. Unless the script configures logging, lines go to stderr.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import Any

from hororing._engine import core, recorder
from hororing._engine.core import ffi, lib
from hororing._job import threads

logger = logging.getLogger("hororing")

# The core forwards only records that are logged; Python has finer levels.
_MIN, _MAX = 10, 40
# A wait of the core ends with hr_log_close; this is for a machine that was suspended.
_WAIT_S = 60.0
# The core says at once why it has failed. The script learns it by an exception, as a rule, and the
# log says it only if that does not happen.
_FAILED = "communication has failed: "
_UNTIL_RAISED_S = 10.0
_COMPARED = 200  # characters; one text may be cut


class _RankPrefix(logging.Filter):
    """Puts "[rank 1]" before messages, if it is known, and warnings into the flight recorder."""

    def __init__(self) -> None:
        super().__init__()
        self.rank: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        rank = getattr(record, "of_rank", self.rank)
        record.msg = ("" if rank is None else f"[rank {rank}] ") + record.getMessage()
        record.args = ()
        if record.levelno >= logging.WARNING:
            recorder.tell(record.levelno, record.msg)
        return True


class _DefaultHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """The present sys.stderr; silent once the script has its own handlers."""

    def __init__(self, hide_time: bool) -> None:
        logging.Handler.__init__(self)
        time = "" if hide_time else "%(asctime)s "
        self.setFormatter(logging.Formatter(time + "%(levelname)s hororing: %(message)s"))

    @property
    def stream(self) -> object:
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


class Forwarder:
    """Takes records out of the core until `close`. One per process."""

    def __init__(self) -> None:
        self._prefix = _RankPrefix()
        self._thread: threading.Thread | None = None
        self._failure: tuple[float, logging.LogRecord] | None = None  # until this time
        logger.addFilter(self._prefix)

    def configure(self, level: int, *, chosen: bool, hide_time: bool) -> None:
        """Set level and default handler.

        `chosen`: the level was given in the environment, which overrules the script's.
        """
        if chosen or logger.level == logging.NOTSET:
            logger.setLevel(level)
        if not logger.hasHandlers():
            logger.addHandler(_DefaultHandler(hide_time))

    @staticmethod
    def core_level() -> int:
        """The lowest level of the core's messages that is logged."""
        return min(max(logger.getEffectiveLevel(), _MIN), _MAX)

    def open(self, rank: int | None) -> None:
        """Start the thread, if it does not run."""
        self._prefix.rank = rank
        if self._thread is None or not self._thread.is_alive():
            lib.hr_log_open()
            # Daemon: it must not keep the interpreter from ending.
            self._thread = threads.start(
                threading.Thread(target=self._run, name="hororing-log", daemon=True)
            )

    def set_rank(self, rank: int | None) -> None:
        """Set the rank that lines name from now on; None if it is not known."""
        self._prefix.rank = rank

    def close(self) -> None:
        """Deliver the remaining records, and end the thread."""
        if self._thread is None:
            return
        lib.hr_log_close()
        self._thread.join(timeout=2)
        self._thread = None

    def _run(self) -> None:
        record = ffi.new("hr_log_record *")
        while (taken := int(lib.hr_log_next(self._left_s(), record))) >= 0:
            if taken == 1:
                self._forward(record)
            if self._left_s() == 0:
                self._tell_failure()
        self._tell_failure()

    def _left_s(self) -> float:
        return max(self._failure[0] - time.monotonic(), 0.0) if self._failure else _WAIT_S

    def _tell_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            text = str(failure[1].msg).removeprefix(_FAILED)[:_COMPARED]
            # With an exception of its own, it is not of interest what others then did.
            known = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
            if not known and not any(text in each for each in core.raised):
                logger.handle(failure[1])

    def _forward(self, record: Any) -> None:
        text = ffi.string(record.text).decode("utf-8", "replace")
        level = int(record.level)
        if logger.isEnabledFor(level):
            made = logger.makeRecord("hororing", level, "core", 0, text, (), None)
            made.created = float(record.time)
            made.of_rank = self._prefix.rank
            if text.startswith(_FAILED) and not logger.isEnabledFor(logging.DEBUG):
                self._failure = time.monotonic() + _UNTIL_RAISED_S, made
            else:
                logger.handle(made)
