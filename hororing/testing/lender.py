"""Lends the terminal of the process of the tests to a rank whose debugger needs it."""

from __future__ import annotations

import contextlib
import sys
import termios
from collections.abc import Callable
from typing import Any

from hororing.testing.channel import Closed
from hororing.testing.messages import Debugging, Terminal
from hororing.testing.processes import Process

_FILES = (0, 1)


class Lender:
    """Of one test. `free`: ends this process's own use of the terminal."""

    def __init__(self, free: Callable[[], None]) -> None:
        self._free = free
        self._rank = -1  # the first that has asked
        self._settings: list[Any] = []
        self.is_lent = False

    def hear(self, process: Process, message: Debugging) -> None:
        """Answer a rank that asks, or take the terminal back."""
        if not message.begins:
            self.take_back(process.rank)
            return
        lent = self._rank in (-1, process.rank)
        if lent:
            self._rank, self.is_lent = process.rank, True
            self._free()
            sys.stdout.flush()
            with contextlib.suppress(termios.error):  # it is none
                self._settings = termios.tcgetattr(_FILES[0])
        with contextlib.suppress(Closed):
            process.control.send(Terminal(lent), _FILES if lent else ())

    def take_back(self, rank: int) -> None:
        """Take it back, if this rank has it, which may have died in the middle of a line."""
        if self.is_lent and rank == self._rank:
            self.is_lent = False
            if self._settings:
                termios.tcsetattr(_FILES[0], termios.TCSADRAIN, self._settings)
