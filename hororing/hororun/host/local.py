"""The processes of one host: starts and watches them, and leaves none behind.

Each rank leads its own session, so that signals also reach the processes that it has started. It is
not reaped until the end, or until `reap` is called: while its id is taken, no other process group
can get it.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Protocol

from hororing._job import limits
from hororing.config import environment
from hororing.hororun.host import cgroup

_READ_BYTES = 2**16
_MOST_READS = 16  # 1 MiB: the largest pipe that a process can have without privileges
STDOUT, STDERR, RESULT = "stdout", "stderr", "result"
_SCRIPT = [sys.executable, "-I", "-S"]  # begins to run in a few ms
# No other rank has the same ones. What a rank starts inherits them, and is known by them (guard).
_MARKS = ("HORORING_JOB", "HORORING_RANK", "HORORING_PROCESS")
_GUARD_S = 3.0  # longer than the guard takes


class CannotStartError(Exception):
    """The job cannot be started; the text says why."""


class Sink(Protocol):
    """Receives events of ranks."""

    def output(self, rank: int, stream: str, data: bytes) -> None:
        """Take output of a rank, in pieces of any size; b"": the stream has ended."""

    def exited(self, rank: int, code: int) -> None:
        """Note the end of a rank: its exit code, or minus the signal."""


@dataclass(frozen=True)
class Program:
    """The program of a rank. In an elastic job, `rank` is the process number (`elastic`)."""

    rank: int
    command: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    sharing: int = 0  # number of ranks that share this host's cores; 0: HORORING_LOCAL_SIZE
    stdin: IO[bytes] | int | None = None  # None: nothing
    answers: bool = False  # the command gets one more word: a descriptor for its RESULT


class ProcessHost(Protocol):
    """A host of a job. Called in the thread that polls the job's selector."""

    ready: bool  # `start` may be called
    hostname: str  # as its processes call it

    def start(self, programs: Sequence[Program]) -> None:
        """Start the ranks of `programs`, which have one command. CannotStartError."""

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to every running rank, or to one."""

    def stopped(self) -> set[int]:
        """The ranks that a signal has stopped, as far as this process can see."""

    def silent_s(self) -> float:
        """Ask the host for a sign of life; return for how long it has not answered."""

    def reap(self, rank: int) -> None:
        """Remove a rank that has ended."""

    def close(self) -> None:
        """End all ranks; leave nothing behind."""


@dataclass(eq=False)
class _Process:
    program: Program
    popen: subprocess.Popen[bytes]
    pidfd: int
    streams: dict[str, IO[bytes]] = field(default_factory=dict)
    running: bool = True


def start(command: Sequence[str], **how: object) -> subprocess.Popen[bytes]:
    """Start a process that leads a session and dies with this one."""
    wrapper = [*_SCRIPT, str(Path(__file__).with_name("exec_rank.py"))]
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        [*wrapper, str(os.getpid()), str(limits.users_files()), *command],
        start_new_session=True,
        **how,
    )


def step(selector: selectors.BaseSelector, timeout_s: float | None = None) -> None:
    """Wait for events, for at most `timeout_s`, and call the registered functions."""
    for key, _ in selector.select(timeout_s):
        # An earlier call may have unregistered this file.
        if selector.get_map().get(key.fd) == key:
            key.data()


def memory_file(name: str, data: bytes) -> int:
    """A descriptor of a file in memory, for ranks to inherit; no other user can open it."""
    number = os.memfd_create(f"hororing-{name}")
    os.fchmod(number, 0o600)
    append(number, data)
    return number


def append(number: int, data: bytes | bytearray) -> None:
    """Write everything."""
    left = memoryview(data)
    while left:
        left = left[os.write(number, left) :]


def _with_threads(program: Program) -> dict[str, str]:
    """Divide the cores among this host's ranks: libraries would start threads for all of them."""
    cores = cgroup.cores()
    ranks = program.sharing or int(program.environment.get("HORORING_LOCAL_SIZE", 1))
    return {"OMP_NUM_THREADS": str(max(cores // ranks, 1)), **program.environment}


def _mark(environment: Mapping[str, str]) -> list[str]:
    """The variables by which the guard knows what a rank has started; none: they are not unique."""
    found = [f"{name}={environment[name]}" for name in _MARKS if environment.get(name)]
    known = len(found) > 1 and all(re.fullmatch(r"[\w=.-]+", each) for each in found)
    return found if known else []


class LocalRanks:
    """The ranks on this host. Everything happens in the thread that polls `selector`."""

    def __init__(self, selector: selectors.BaseSelector, sink: Sink) -> None:
        """The data of registered files are functions without arguments, which the caller calls."""
        self._selector = selector
        self._sink = sink
        self._processes: list[_Process] = []
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self, program: Program, secret_fd: int) -> None:
        """Start a rank. OSError if that is impossible."""
        guard = self._guard or self._start_guard()
        command, passed, result = list(program.command), [secret_fd], None
        if program.answers:
            reading, writing = os.pipe()
            result = os.fdopen(reading, "rb", buffering=0)
            command.append(str(writing))
            passed.append(writing)
        try:
            popen = start(
                command,
                env=_with_threads(program),
                cwd=program.directory,
                stdin=subprocess.DEVNULL if program.stdin is None else program.stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=passed,
            )
        finally:
            for each in passed[1:]:
                os.close(each)
        assert popen.stdout is not None
        assert popen.stderr is not None
        process = _Process(program, popen, os.pidfd_open(popen.pid))
        self._processes.append(process)
        self._send_to_guard(guard, popen.pid, _mark(program.environment))
        process.streams = {STDOUT: popen.stdout, STDERR: popen.stderr}
        if result is not None:
            process.streams[RESULT] = result
        for name, stream in process.streams.items():
            os.set_blocking(stream.fileno(), False)
            self._register(stream, partial(self._read, process, name))
        self._register(process.pidfd, partial(self._ended, process))

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to every running rank, or to one, and to the processes that it started."""
        for process in self._processes:
            if process.running and rank in (None, process.program.rank):
                _kill(process, number)

    def stopped(self) -> set[int]:
        """The ranks that a signal has stopped."""
        return {each.program.rank for each in self._processes if each.running and _is_stopped(each)}

    def reap(self, rank: int) -> None:
        """End what an ended rank leaves behind, and forget it: another may take its place.

        For jobs that continue after a rank's end, and would otherwise collect zombies.
        """
        dead = [each for each in self._processes if each.program.rank == rank]
        for process in dead:
            _kill(process, signal.SIGKILL)
        for process in dead:
            if self._guard is not None:
                with contextlib.suppress(OSError):  # it was killed
                    self._send_to_guard(self._guard, -process.popen.pid)
            self._reap(process)
            self._processes.remove(process)

    def close(self) -> None:
        """End all remaining processes of the ranks, children too, and pass on their last output."""
        for process in self._processes:
            _kill(process, signal.SIGKILL)
        for process in self._processes:
            self._reap(process)
        self._processes.clear()
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):  # it was killed
                self._guard.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(_GUARD_S)
            self._guard = None

    def _reap(self, process: _Process) -> None:
        process.popen.wait()
        for name in list(process.streams):
            self._drain(process, name)
            self._forget(process, name)
        if process.running:
            self._selector.unregister(process.pidfd)
        os.close(process.pidfd)

    def _send_to_guard(
        self, guard: subprocess.Popen[bytes], number: int, mark: Sequence[str] = ()
    ) -> None:
        assert guard.stdin is not None
        guard.stdin.write(" ".join([str(number), *mark]).encode() + b"\n")
        guard.stdin.flush()

    def _start_guard(self) -> subprocess.Popen[bytes]:
        self._guard = subprocess.Popen(
            [*_SCRIPT, str(Path(__file__).with_name("guard.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment.inherited(),  # an outer job must not end it first
        )
        return self._guard

    def _register(self, file: int | IO[bytes], call: Callable[[], object]) -> None:
        self._selector.register(file, selectors.EVENT_READ, call)

    def _ended(self, process: _Process) -> None:
        about = os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if about is None:
            return
        self._selector.unregister(process.pidfd)
        process.running = False
        for name in list(process.streams):
            self._drain(process, name)
        killed = about.si_code != os.CLD_EXITED
        self._sink.exited(process.program.rank, -about.si_status if killed else about.si_status)

    def _drain(self, process: _Process, name: str) -> None:
        """Pass on what is in the pipe. A process that was left behind may still be filling it."""
        for _ in range(_MOST_READS):
            if name not in process.streams or not self._read(process, name):
                break

    def _read(self, process: _Process, name: str) -> bool:
        try:
            data = os.read(process.streams[name].fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._sink.output(process.program.rank, name, data)
        else:
            self._forget(process, name)
        return bool(data)

    def _forget(self, process: _Process, name: str) -> None:
        stream = process.streams.pop(name, None)
        if stream is not None:
            self._selector.unregister(stream)
            stream.close()
            self._sink.output(process.program.rank, name, b"")


def _is_stopped(process: _Process) -> bool:
    status = Path(f"/proc/{process.popen.pid}/stat").read_bytes()
    return status.rpartition(b") ")[2].startswith(b"T")


def _kill(process: _Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.popen.pid, number)
