"""pytest within a rank: it has collected the same tests, and runs those that it is told.

So fixtures, marks, assertions and other plug-ins work in each rank as in plain pytest.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import time
import unittest
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from _pytest.config import create_terminal_writer

from hororing.hororun.call import text_of
from hororing.hororun.host.local import memory_file
from hororing.testing.channel import Channel
from hororing.testing.debugger import Debugger
from hororing.testing.faults import armed
from hororing.testing.mark import delays_of
from hororing.testing.messages import Ended, Failing, Phase, Seat, Suite, Test, Warned
from hororing.testing.world import Worlds, is_by_peers

NAME = "hororing-rank"  # of this plug-in; a process that has it is a rank


def collect(suite: Suite) -> Items:
    """Collect the tests. The problems of files that cannot be are in `Items.problems`."""
    plugins = [*suite.options.get("plugins", []), "no:terminal", "no:rerunfailures"]
    options = {**suite.options, "plugins": plugins}
    config = pytest.Config.fromdictargs(options, suite.arguments)
    # Without the terminal reporter, pytest-timeout needs this.
    config.get_terminal_writer = lambda: create_terminal_writer(config)  # type: ignore[method-assign]
    debugger = Debugger(after_failures=config.option.usepdb)
    if suite.worker is not None:
        config.workerinput = suite.worker  # type: ignore[attr-defined]
    for name, value in _OFF.items():
        if hasattr(config.option, name):
            setattr(config.option, name, value)
    items = Items(config, debugger)
    config.pluginmanager.register(items, NAME)
    config.pluginmanager.register(debugger)
    config._do_configure()
    items.session = pytest.Session.from_config(config)
    config.hook.pytest_sessionstart(session=items.session)
    with contextlib.suppress(pytest.UsageError):  # no test is left
        for item in items.session.perform_collect():
            items.known[item.nodeid] = item
    return items


# Options of the process of the tests that would make a rank do its work.
_OFF = {
    "usepdb": False, "dist": "no", "distload": False, "numprocesses": None, "maxprocesses": None,
    "tx": [], "lf": False, "failedfirst": False, "newfirst": False, "stepwise": False,
    "cacheclear": False, "maxfail": 0, "collectonly": False, "reruns": None, "xmlpath": None,
    "durations": None, "cov_source": [], "no_cov": True,
}  # fmt: skip


class Items:
    """The tests of a rank, and the plug-in that observes them."""

    def __init__(self, config: pytest.Config, debugger: Debugger) -> None:
        self._config, self._debugger = config, debugger
        self.session: Any = None
        self.known: dict[str, pytest.Item] = {}
        self.problems: dict[str, str] = {}  # by node id of a collector
        self._send: Callable[[object], None] = lambda _: None
        self._worlds: Worlds | None = None
        self._failing: Failing | None = None
        self._line = 0
        self._between = -1
        self._rank = -1

    def become(self, seat: Seat) -> tuple[int, ...]:
        """See `rank.Work`."""
        self._rank = seat.rank
        if seat.folder:
            self._config.option.basetemp = seat.folder
            paths = self._config._tmp_path_factory  # type: ignore[attr-defined]
            paths._given_basetemp, paths._basetemp = Path(seat.folder), None
        if self._config.option.capture == "no":
            return ()
        capture: Any = self._config.pluginmanager.getplugin("capturemanager")
        # A copy would share the files, and their positions, with all other ranks.
        capture.suspend_global_capture(in_=True)
        capture.stop_global_capturing()
        # What is printed between the phases of tests, such as by threads.
        self._between = memory_file("output", b"")
        for number in (1, 2):
            os.dup2(self._between, number)
        capture.start_global_capturing()
        files = [self._between]
        for each in (capture._global_capturing.out, capture._global_capturing.err):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # not with files
                files.append(each.tmpfile.fileno())
        return tuple(files)

    def test(self, order: Test, control: Channel, worlds: Worlds) -> Ended:
        """See `rank.Work`."""
        item = self._find(order.node_id)
        if item is None:
            problems = "\n".join(self.problems.values())
            return Ended(escaped=f"the rank has not collected {order.node_id}\n{problems}".strip())
        self._send, self._worlds, self._line = control.send, worlds, 0
        self._debugger.begin_test(control, self._rank)
        if self._between >= 0:
            os.ftruncate(self._between, 0)
        state = self.session._setupstate
        if any(node not in item.listchain() for node in state.stack):  # other tests were expected
            state.teardown_exact(item)
        following = self._find(order.next_id) if order.next_id else None
        quits = False
        try:
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        except pytest.exit.Exception as error:
            quits = error.msg == "Quitting debugger"
            if not quits:
                raise
        finally:
            self._debugger.end_test()
        return Ended(self._line, quits=quits)

    def _find(self, node_id: str) -> pytest.Item | None:
        # pytest-xdist adds the name of a group.
        return self.known.get(node_id) or self.known.get(node_id.rpartition("@")[0])

    def finish(self) -> None:
        """See `rank.Work`."""
        capture: Any = self._config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # as pytest does, for each phase
        self.session._setupstate.teardown_exact(None)
        self._config.hook.pytest_sessionfinish(session=self.session, exitstatus=0)

    # -----------------------------------------------------------------------------------------
    # Hooks

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note what could not be collected."""
        if report.failed:
            self.problems[report.nodeid] = report.longreprtext

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        """Let what a fixture initialises live as long as that, if several tests share it."""
        worlds = self._worlds
        if worlds is None or worlds.kept or fixturedef.scope == "function":
            return (yield)
        with worlds.keeping() as end:
            fixturedef.addfinalizer(end)
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note the line at which the test ends."""
        armed.delays = delays_of(item)
        function = getattr(item, "obj", None)
        with last_line_of(function, armed.watch if armed.delays else None) as found:
            try:
                result = yield
                armed.check()
                return result
            finally:
                self._line = found()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Let the other ranks know about an exception, before the report is made."""
        self._failing = None
        self._note(call)
        report = yield
        if self._failing is None:
            self._note(call)  # of a unittest.TestCase, which another plug-in has put there
        return report

    def _note(self, call: pytest.CallInfo[None]) -> None:
        error = call.excinfo.value if call.excinfo is not None else None
        if error is not None and not isinstance(error, (pytest.skip.Exception, unittest.SkipTest)):
            blame = "peers" if is_by_peers(error) else "own"
            self._failing = Failing(call.when, blame, text_of(error), time.monotonic())
            self._send(self._failing)
            assert self._worlds is not None
            self._worlds.abandon(error)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send the report."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        failing = self._failing or Failing("", "", "", time.monotonic())
        self._send(Phase(report.when or "", data, failing.at, failing.blame, failing.error))

    @pytest.hookimpl
    def pytest_exception_interact(
        self, node: pytest.Item | pytest.Collector, call: pytest.CallInfo[Any], report: Any
    ) -> None:
        """Debug a failure, if that is wanted."""
        if isinstance(node, pytest.Item):
            self._debugger.after(self._failing, call, report)

    @pytest.hookimpl
    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        """Send the warning."""
        text, kind = str(warning_message.message), warning_message.category
        if kind.__module__ != "builtins":
            kind = UserWarning
        about = (text, kind.__name__, warning_message.filename, warning_message.lineno)
        self._send(Warned(about, when, nodeid, location))


@contextlib.contextmanager
def last_line_of(
    function: Any, then: Callable[[], None] | None = None
) -> Iterator[Callable[[], int]]:
    """Return a function that returns the line at which `function` is or has ended, or 0.

    Python keeps the line in the frame. To get hold of that, a profiler watches until the function
    has been called, and costs nothing after that. `then` is called at that time.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    frames: list[FrameType] = []
    before = sys.getprofile()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code is code:
            frames.append(frame)
            sys.setprofile(before)
            if then is not None:
                then()

    if code is not None and before is None:
        sys.setprofile(watch)
    try:
        yield lambda: frames[0].f_lineno if frames else 0
    finally:
        if sys.getprofile() is watch:
            sys.setprofile(before)
        frames.clear()
        armed.clear()
