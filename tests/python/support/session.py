"""Test files that share one job per size: importing a framework takes longer than their cases.

The cases of all files run in the same processes, one file after the other, with `shutdown()`
between them (on_rank.py). A test waits only for its own file. A file that fails runs again, alone:
that result counts, and a warning shows the first. The remaining files run in a new job.
"""

from __future__ import annotations

import re
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mpirun
import pytest
import tiers


class Session:
    """The files of one framework, for one number of ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.files: list[str] = []
        self._finished: dict[str, mpirun.Job] = {}
        self._running: _Running | None = None

    def results(self, file: str) -> mpirun.Job:
        """Wait for the results of `file`, and return them."""
        while file not in self._finished:
            if self._running is None:
                at = self.files.index(file)
                self._running = _Running(self.files[at:], self.size)
            name, job, passed = self._running.wait_for_next()
            if not passed:
                self._running.kill()
                self._running = None
                alone = mpirun.cases_of(name, self.size)
                passed = all(set(result.values()) == {""} for result in alone.results)
                again = "passed" if passed else "failed"
                what = f"{Path(name).name} failed among other files, and {again} alone"
                warnings.warn(f"{what}\n{job.report()}", stacklevel=2)
                job = alone
            self._finished[name] = job
            if self._running is not None and not self._running.left:
                ending, self._running = self._running, None
                ending.wait()
        return self._finished[file]


class _Running:
    """A job that runs the files in `left`."""

    def __init__(self, files: list[str], size: int) -> None:
        self.left = list(files)
        self._size = size
        self._seed = mpirun.new_seed()
        self._number = 0
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        variables = {**mpirun.STALL_ENVIRONMENT, "TEST_SEED": str(self._seed)}
        by = "mpirun" if size > 1 else ""
        self._process = mpirun.start(self._folder.name, size, files, variables, by=by)

    def wait_for_next(self) -> tuple[str, mpirun.Job, bool]:
        """Wait for the next file; return it, its results, and whether all cases passed in time."""
        deadline = time.monotonic() + mpirun.CASES_LIMIT_S
        while not self._done():
            ended = self._process.poll() is not None
            if (ended and not self._done()) or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        passed = self._done()
        code = self._process.poll()
        job = mpirun.collect(self._folder.name, self._size, code, self._seed, self._number)
        self._number += 1
        return self.left.pop(0), job, passed

    def _done(self) -> bool:
        return all(
            Path(self._folder.name, f"{rank}.{self._number}.done").exists()
            for rank in range(self._size)
        )

    def wait(self) -> None:
        """Wait for the end of a job whose cases have all passed. Raise if it does not end."""
        try:
            self._process.wait(60)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the job."""
        mpirun.kill(self._process)
        self._folder.cleanup()


_SESSIONS: dict[tuple[str, int], Session] = {}


def on_ranks(
    namespace: dict[str, Any],
    *sizes: int,
    push: Sequence[int] = (3,),
    session: str = "",
    cases: Sequence[str] | None = None,
) -> Callable[[str, int], None]:
    """Return a test that runs the cases of a file on ranks. Assign it to a name `test_...`.

    `sizes`: numbers of ranks, of which `push` are in the push tier. `session`: a framework, whose
    files share their jobs; "": none. `cases`: the names of the cases, if only ranks can import the
    file.
    """
    file = namespace["__file__"]

    @pytest.mark.timeout(2 * mpirun.CASES_LIMIT_S + 20)  # in the shared job, and again alone
    @pytest.mark.parametrize(
        "size", tiers.choose(sizes, push), ids=lambda size: f"{session}:{size}" if session else None
    )
    @pytest.mark.parametrize("case", cases or mpirun.case_names(namespace))
    def test(case: str, size: int) -> None:
        shared = _SESSIONS.get((session, size))
        found = shared.results(file) if shared else mpirun.cases_of(file, size)
        found.check(case)

    test.session = (session, file)  # type: ignore[attr-defined]
    return test


def group(test: str) -> str:
    """Return what runs in one process of pytest-xdist: the tests of a shared job, or of a file."""
    shared = re.search(r"-([\w ]+:\d+)\]$", test)  # the ids of on_ranks
    return shared[1] if shared else test.split("::")[0]


def plan(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Assign the selected files to jobs; return the tests in the order of jobs."""
    first: dict[str, int] = {}
    order = []
    for number, item in enumerate(items):
        session, file = getattr(getattr(item, "function", None), "session", ("", ""))
        if session:
            size = item.callspec.params["size"]  # type: ignore[attr-defined]
            found = _SESSIONS.setdefault((session, size), Session(size))
            if file not in found.files:
                found.files.append(file)
        order.append((first.setdefault(group(item.nodeid), number), number, item))
    return [item for _, _, item in sorted(order, key=lambda each: each[:2])]
