"""The ranks of one session of pytest, or of one worker of pytest-xdist."""

from __future__ import annotations

import builtins
import pickle
import secrets
import sys
import warnings
from typing import Any

import pytest

from hororing.testing import measuring, reports
from hororing.testing.lender import Lender
from hororing.testing.mark import size_of, wish_for
from hororing.testing.messages import BACKENDS, Plan, Suite, Test, Warned
from hororing.testing.pool import Pool
from hororing.testing.processes import Starter, StartError

_MOST_POOLS = 4  # of different sizes; the one that was not used for longest ends first


class Ranks:
    """Pools of ranks by size, made when a test needs them."""

    def __init__(self, session: pytest.Session) -> None:
        self._session, self._config = session, session.config
        self._marked = [item for item in session.items if size_of(item)]
        plan = Plan(list(sys.path), list(sys.argv), _suite(session.config, self._marked),
                    coverage=measuring.how())  # fmt: skip
        self._starter = Starter(plan, str(session.config.invocation_params.dir))
        self._pools: dict[int, Pool] = {}
        self._made = 0
        self._quits = False  # the debugger
        repeated = [each for each in self._marked if each.get_closest_marker("flaky")]
        if self._marked and (repeated or getattr(self._config.option, "reruns", None)):
            text = "pytest-rerunfailures does not repeat tests with the mark `ranks`"
            self._config.issue_config_time_warning(pytest.PytestWarning(text), stacklevel=2)

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Run a test on ranks, and report it."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in [*self._reports(item), *_torn_down(item, nextitem)]:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if self._quits:
            pytest.exit("Quitting debugger")

    def _reports(self, item: pytest.Item) -> list[pytest.TestReport]:
        try:
            wish = wish_for(item)
        except pytest.fail.Exception as error:
            return reports.not_started(item, str(error))
        limit_s = wish.limit_s or self._limit_s()
        backend = wish.backend or self._backend()
        try:
            pool = self._pool(size_of(item), wish.elastic)
        except StartError as error:
            return reports.not_started(item, str(error))
        following = "" if wish.elastic else self._after(item)
        order = Test(item.nodeid, following, pool.world(backend, wish.init))
        outcomes = pool.run(order, limit_s, self._warn, Lender(self._free_terminal))
        if not pool.usable:
            pool.finish()
        quitting = [each for each in outcomes if each.quits]
        self._quits = bool(quitting)
        return reports.merge(item, quitting or outcomes, limit_s)

    def _free_terminal(self) -> None:
        manager = self._config.pluginmanager
        if (capture := manager.getplugin("capturemanager")) is not None:
            capture.suspend_global_capture(in_=True)
        if (reporter := manager.getplugin("terminalreporter")) is not None:
            reporter.ensure_newline()

    def _backend(self) -> str:
        found = str(self._config.getini("ranks_backend"))
        if found not in BACKENDS:
            raise pytest.UsageError(f"ranks_backend = {found}: there are {', '.join(BACKENDS)}")
        return found

    def _limit_s(self) -> float:
        text = self._config.getini("ranks_limit_s")
        try:
            found = float(text)
        except ValueError:
            found = 0.0
        if not 0 < found < 1e9:
            raise pytest.UsageError(f"ranks_limit_s = {text}: not a number of seconds above 0")
        return found

    def _pool(self, size: int, elastic: bool) -> Pool:
        found = None if elastic else self._pools.pop(size, None)
        if found is None or not found.usable:
            if len(self._pools) >= _MOST_POOLS:
                self._pools.pop(next(iter(self._pools))).finish()
            self._made += 1
            folder = self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
            folder = str(folder / f"ranks{self._made}")
            found = Pool(self._starter, size, folder, elastic=elastic)
        if not elastic:
            self._pools[size] = found  # now the last
        return found

    def _after(self, item: pytest.Item) -> str:
        """The next test of these ranks, as far as known: pytest-xdist gives it to any worker."""
        size, at = size_of(item), self._marked.index(item)
        return next((each.nodeid for each in self._marked[at + 1 :] if size_of(each) == size), "")

    def _warn(self, warned: Warned) -> None:
        text, kind, file, line = warned.message
        message = warnings.WarningMessage(
            text, getattr(builtins, kind, UserWarning), file, line
        )  # fmt: skip
        self._config.hook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": message, "when": warned.when, "nodeid": warned.node_id,
                "location": warned.location,
            }
        )  # fmt: skip

    def finish(self) -> None:
        """Tear down the fixtures of all ranks, and end them."""
        problems = [pool.finish() for pool in self._pools.values()]
        self.close()
        for each in filter(None, problems):
            self._config.issue_config_time_warning(pytest.PytestWarning(each), stacklevel=2)

    def close(self) -> None:
        """End the ranks at once."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        self._starter.close()


def _torn_down(item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
    """Tear down what earlier tests of this process have left for ones that come no more."""
    state = item.session._setupstate
    call = pytest.CallInfo.from_call(lambda: state.teardown_exact(nextitem), "teardown")
    if call.excinfo is None:
        return []
    report: pytest.TestReport = item.ihook.pytest_runtest_makereport(item=item, call=call)
    return [report]


def _suite(config: pytest.Config, items: list[pytest.Item]) -> Suite:
    options = {}
    for name, value in vars(config.option).items():
        try:
            pickle.dumps(value)
        except Exception:  # of a plug-in; pytest-xdist could not pass it on either
            continue
        options[name] = value
    options.pop("file_or_dir", None)  # `arguments` has the files
    if "hypothesis_seed" in options and options["hypothesis_seed"] is None:
        options["hypothesis_seed"] = str(secrets.randbits(32))  # the same examples on all ranks
    arguments = ["--rootdir", str(config.rootpath)]
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    for each in options.get("override_ini") or ():
        arguments += ["-o", each]
    arguments += dict.fromkeys(str(item.path) for item in items)
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    return Suite(arguments, options, worker)
