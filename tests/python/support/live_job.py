"""A job under mpirun that a test observes and disturbs while it runs.

A mark in the environment identifies the processes of the job, even those that have lost their
parents. In /dev/shm, MPI's files are in a folder of the job, and hororing's have the process ids of
its ranks in their names, so other jobs on this machine do not matter.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import mpirun

T = TypeVar("T")
MARK = "TEST_JOB"
SHM = Path("/dev/shm")
# Time limit for reaching a state, in s: long, for busy machines.
PATIENCE_S = 150  # a busy machine with a slow disk takes a minute to import TensorFlow


def poll(look: Callable[[], T], timeout_s: float = PATIENCE_S) -> T:
    """Call `look` until it returns something true, or the time limit; return its last result."""
    deadline = time.monotonic() + timeout_s
    while not (answer := look()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return answer


def processes_marked(mark: str) -> list[int]:
    """Return the live processes (not zombies) with `mark` in their environment."""
    wanted = f"{MARK}={mark}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if wanted in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has ended, or belongs to another user
                continue
    return found


class LiveJob:
    """Runs `function` of a file of rank scripts (`file FUNCTION ARGS`) on `size` ranks.

    `hosts` is the same as for mpirun.run; `by` is the launcher.
    """

    def __init__(
        self,
        file: Path,
        size: int,
        function: str,
        *args: str,
        options: Iterable[str] = (),
        hosts: str = "",
        by: str = "mpirun",
        **environment: str,
    ) -> None:
        self.size = size
        self.mark = uuid.uuid4().hex
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.out = Path(self._folder.name)
        self._mpi_files = Path(tempfile.mkdtemp(prefix="test-", dir=SHM))
        # Every emulated host has its own /dev/shm, which ends with it.
        files = {} if hosts else {"OMPI_MCA_btl_sm_backing_directory": str(self._mpi_files)}
        self.launcher = mpirun.start(
            self._folder.name, size, ["--script", str(file), function, *args],
            {MARK: self.mark, **files, **environment}, hosts, options=options, by=by,
        )  # fmt: skip

    def __enter__(self) -> LiveJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None
    ) -> None:
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        mpirun.kill(self.launcher)
        if value is not None:
            print(self.report())
        self._folder.cleanup()
        shutil.rmtree(self._mpi_files, ignore_errors=True)

    def printed(self, rank: int) -> str:
        """Return the output of a rank so far."""
        file = self.out / f"{rank}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def said(self, rank: int, word: str) -> str:
        """Wait for a line of a rank that begins with `word`; return its rest."""

        def look() -> str | None:
            for line in self.printed(rank).splitlines(keepends=True):
                if line.endswith("\n") and line.split()[:1] == [word]:
                    return line
            return None

        line = poll(look)
        assert line is not None, f"rank {rank} did not print {word!r}\n{self.report()}"
        return line.partition(word)[2].strip()

    def pid(self, rank: int) -> int:
        """Return the process id that a rank has printed."""
        return int(self.said(rank, "pid"))

    def wait_until_all_say(self, word: str) -> None:
        for rank in range(self.size):
            self.said(rank, word)

    def alive(self) -> list[int]:
        """Return the processes of this job, including mpirun."""
        return processes_marked(self.mark)

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for mpirun, check that no process is left, and return mpirun's exit code."""
        code = poll(lambda: [self.launcher.poll()] if self.launcher.poll() is not None else None)
        assert code, f"mpirun still runs\n{self.report()}"
        left = poll(lambda: not self.alive(), timeout_s) or self.alive()
        assert left is True, f"processes are left: {left}\n{self.report()}"
        return code[0]

    def files_left(self, timeout_s: float = 5, of_mpi: bool = True) -> set[str]:
        """Wait until the job's files in /dev/shm are removed; return those that are left."""

        def left() -> set[str]:
            pids = [file.read_text() for file in self.out.glob("*.pid")]
            ours = tuple(f"hororing.{pid}." for pid in pids)
            found = {name for name in os.listdir(SHM) if name.startswith(ours)}
            return found | set(os.listdir(self._mpi_files) if of_mpi else ())

        poll(lambda: not left(), timeout_s)
        return left()

    def report(self) -> str:
        """Return the output of all processes, for failures."""
        launcher = (self.out / "launcher.out").read_text(errors="replace")
        printed = [f"--- rank {rank} printed\n{self.printed(rank)}" for rank in range(self.size)]
        return "\n".join([*printed, f"--- mpirun printed\n{launcher}"])
