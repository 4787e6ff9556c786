"""pytest's debugger in a rank: --pdb, --trace and breakpoint().

The first rank that stops in a test gets the terminal, and no limit counts meanwhile. The other
ranks never stop: if they did, a step over a collective would wait for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from _pytest.debugging import post_mortem  # pytest has no public name for it

from hororing.testing.channel import Channel
from hororing.testing.messages import Debugging, Failing, Terminal

_STREAMS = (0, 1, 2)


class Debugger:
    """A plug-in of the pytest of a rank. `after_failures`: --pdb."""

    def __init__(self, after_failures: bool) -> None:
        self._after_failures = after_failures
        self._control: Channel | None = None
        self._rank = -1
        self._terminal: list[int] = []  # its stdin and stdout, once this test has got it
        self._own: list[int] = []  # this process's streams, while the terminal replaces them
        self._failure = ""

    def begin_test(self, control: Channel, rank: int) -> None:
        """Begin a test."""
        self._control, self._rank = control, rank

    def end_test(self) -> None:
        """End a test."""
        self._return()
        for each in self._terminal:
            os.close(each)
        self._terminal.clear()

    def after(self, failing: Failing | None, call: Any, report: pytest.TestReport) -> None:
        """Debug a failure, if it is this rank's own and --pdb wants that."""
        if self._after_failures and failing is not None and failing.blame == "own":
            self._failure = report.longreprtext
            post_mortem(call.excinfo.tb)

    def pytest_enter_pdb(self, config: pytest.Config, pdb: Any) -> None:
        """Borrow the terminal; without it, the debugger does nothing."""
        if self._borrow():
            pdb.setup = self._then_take_streams(pdb.setup)
            return
        pdb.set_trace = pdb.reset = pdb.interaction = _do_nothing
        pdb.runcall = _call
        pdb.quitting = False
        _capture(config).resume()

    def pytest_leave_pdb(self, config: pytest.Config) -> None:
        """Return the terminal."""
        _capture(config).suspend(in_=True)
        self._return()
        _capture(config).resume()

    def _borrow(self) -> bool:
        assert self._control is not None
        self._control.send(Debugging(True))
        answer, files = self._control.receive()
        assert isinstance(answer, Terminal)
        for each in self._terminal:
            os.close(each)
        self._terminal = files
        return answer.lent

    def _then_take_streams(self, setup: Callable[..., Any]) -> Callable[..., Any]:
        """Return a pdb.setup: each stop of the debugger calls it."""

        def wrapper(*args: Any) -> Any:
            ends = setup(*args)
            if self._own:
                return ends
            if not self._terminal:
                self._borrow()
            self._own = [os.dup(each) for each in _STREAMS]
            stdin, stdout = self._terminal
            for number, each in zip(_STREAMS, (stdin, stdout, stdout), strict=True):
                os.dup2(each, number)
            print(f"\n{self._failure}\n>>> rank {self._rank} stops here; other ranks go on")
            self._failure = ""
            return ends

        return wrapper

    def _return(self) -> None:
        if not self._own:
            return
        print(flush=True)
        for number, each in zip(_STREAMS, self._own, strict=True):
            os.dup2(each, number)
            os.close(each)
        self._own = []
        assert self._control is not None
        self._control.send(Debugging(False))


def _capture(config: pytest.Config) -> Any:
    return config.pluginmanager.getplugin("capturemanager")


def _do_nothing(*args: Any, **named: Any) -> None: ...


def _call(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return function(*args, **named)
