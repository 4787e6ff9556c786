"""Says what a long wait waits for: after 15 s, then after twice as long as the last time."""

from __future__ import annotations

import logging
import time

FIRST_S = 15.0


class Patience:
    """A wait that begins now. `hint`: what may be wrong, for the reader of its lines."""

    def __init__(self, hint: str = "") -> None:
        self._began = time.monotonic()
        self._next_s = FIRST_S
        self._hint = f"; {hint}" if hint else ""

    def left_s(self) -> float:
        """Seconds until `say` has something to say."""
        return max(self._began + self._next_s - time.monotonic(), 0.0)

    def say(self, who: str, what: str) -> None:
        """Warn that `who` still waits for `what`, if it is time."""
        if self.left_s() > 0:
            return
        waited_s = time.monotonic() - self._began
        self._next_s = 2 * waited_s
        logging.getLogger("hororing").warning(
            "init: %s has waited %.0f s for %s%s", who, waited_s, what, self._hint
        )
