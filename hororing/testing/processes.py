"""Starts the processes of ranks, and leaves none behind."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hororing.config import environment
from hororing.hororun.host import guard, local
from hororing.testing import fork_server
from hororing.testing.channel import Channel, Closed, pair
from hororing.testing.messages import Plan, Seat

_START_S = 300.0  # to import and collect: a busy machine takes a minute to import TensorFlow
_GUARD_S = 3.0
# Unless the user sets them. Several threads are waste with several ranks, and cannot be forked.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class StartError(RuntimeError):
    """Ranks cannot be started; the text says why."""


@dataclass(eq=False)
class Process:
    """The process of a rank."""

    rank: int
    pid: int
    pidfd: int
    control: Channel
    watch: Channel
    code: Callable[[], int]  # waits for its end; returns the exit code, or minus the signal
    files: list[int] = field(default_factory=list)  # of `Hello`

    def send(self, message: object) -> None:
        """Send a message. A rank that has died is noticed by its pidfd."""
        with contextlib.suppress(Closed):
            self.control.send(message)

    def kill(self) -> None:
        """End the process and its children."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # not yet a leader of its group
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Close the channels and files of a process that has ended."""
        self.control.close()
        self.watch.close()
        for each in (self.pidfd, *self.files):
            os.close(each)


class Guard:
    """Ends what ranks have started, even if this process is killed (hororun/host/guard.py)."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guard.__file__))],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, env=environment.inherited(),
        )  # fmt: skip

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def add(self, pid: int, variables: dict[str, str]) -> None:
        """Watch over a rank: its process group, and what has its variables."""
        names = ("HORORING_JOB", "HORORING_RANK", "HORORING_PROCESS")
        marks = [f"{name}={variables[name]}" for name in names if name in variables]
        self._tell(" ".join([str(pid), *marks]))

    def ended(self, pid: int) -> None:
        """A rank has ended: end what it has left."""
        self._tell(str(-pid))

    def close(self) -> None:
        """Wait until it has ended all that is left."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_GUARD_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Starter:
    """Starts ranks for one plan; the fork server starts with the first."""

    def __init__(self, plan: Plan, directory: str) -> None:
        self.plan, self._directory = plan, directory
        self._guard: Guard | None = None
        self._server: _Prepared | None = None
        self._forks = True

    def start(self, size: int, variables: Callable[[int], dict[str, str]], folder: str,
              secret: int, store: int) -> list[Process]:  # fmt: skip
        """Start ranks, which then say `Hello`. StartError if that is impossible."""
        started: list[Process] = []
        try:
            prepared = self._prepared(size)
            for rank, each in enumerate(prepared):
                its = f"{folder}-{rank}" if folder else ""
                seat = Seat(rank, size, variables(rank), its)
                started.append(self._seat(each, seat, secret, store))
        except BaseException as error:
            for process in started:
                process.kill()
                process.close()
            self._drop_server()
            if isinstance(error, Closed):
                raise StartError("a process for ranks has ended") from None
            raise
        return started

    def _prepared(self, size: int) -> list[_Prepared]:
        """The process from which each rank is forked, or which becomes it."""
        if self._forks and self._server is not None:
            return [self._server] * size
        made = [_Prepared(self.plan, self._directory)]
        why = made[0].wait()
        if not why:
            self._server = made[0]
            return made * size
        self._forks = False
        made += [_Prepared(self.plan, self._directory) for _ in range(size - 1)]
        for each in made[1:]:
            each.wait()
        return made

    def _seat(self, prepared: _Prepared, seat: Seat, secret: int, store: int) -> Process:
        control, control_end = pair()
        watch, watch_end = pair()
        files = [control_end.fileno(), watch_end.fileno(), secret, store]
        what = "fork" if prepared is self._server else "seat"
        prepared.channel.send((what, seat), files)
        control_end.close()
        watch_end.close()
        if what == "fork":
            pid = prepared.channel.receive(_START_S)[0]
            code = functools.partial(prepared.code_of, pid)
        else:
            pid, code = prepared.popen.pid, prepared.popen.wait
        if self._guard is None:
            self._guard = Guard()
        self._guard.add(pid, dict(seat.variables))
        return Process(seat.rank, pid, os.pidfd_open(pid), control, watch, code)

    def ended(self, process: Process) -> int:
        """Note the end of a killed or ended process; return its exit code."""
        try:
            code = process.code()
        except (Closed, TimeoutError):  # the fork server was killed, and its ranks with it
            self._drop_server()
            code = -signal.SIGKILL
        process.close()
        if self._guard is not None:
            self._guard.ended(process.pid)
        return code

    def _drop_server(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server = None

    def close(self) -> None:
        """End the fork server, and all that ranks have left."""
        self._drop_server()
        if self._guard is not None:
            self._guard.close()
            self._guard = None


class _Prepared:
    """A process that runs `fork_server`."""

    def __init__(self, plan: Plan, directory: str) -> None:
        self.channel, other = pair()
        self.popen: Any = local.start(
            [sys.executable, "-c", fork_server.PROGRAM, str(other.fileno())],
            env={**_ENVIRONMENT, **environment.inherited()}, cwd=directory,
            stdin=subprocess.DEVNULL, pass_fds=[other.fileno()],
        )  # fmt: skip
        other.close()
        self.channel.send(plan)

    def wait(self) -> str:
        """Wait until it is prepared; return why it cannot be forked. StartError."""
        try:
            (what, text), _ = self.channel.receive(_START_S)
        except Closed:
            raise StartError("a process for ranks has ended before it was ready") from None
        except TimeoutError:
            self.kill()
            raise StartError(f"ranks were not ready after {_START_S:.0f} s") from None
        if what == "failed":
            self.kill()
            raise StartError(f"ranks cannot collect the tests:\n{text}")
        return str(text)

    def code_of(self, pid: int) -> int:
        """Wait for the end of a forked rank; return its exit code."""
        self.channel.send(("code", pid))
        return int(self.channel.receive(30.0)[0])

    def kill(self) -> None:
        """End it."""
        self.popen.kill()
        self.popen.wait()
        self.channel.close()
