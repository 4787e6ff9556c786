"""A job of several ranks, from the start to the exit code.

The first rank that fails gives the job its exit code; the others are then asked to end, and ended
after the time of grace. So they are when hororun is told to end. Any thread can run a job; signals
are noted in the main thread only.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol

from hororing.hororun.local import RESULT, step
from hororing.hororun.output import Output

# Sent on as they are. Of the first, each asks for the end.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
OTHERS = (signal.SIGUSR1, signal.SIGUSR2)
# For a host to tell that its ranks are dead, when they have been killed.
_KILLED_S = 10.0


class CannotStartError(Exception):
    """The job cannot be started; the text says why."""


class Host(Protocol):
    """Ranks of a host, or what stands for them here."""

    name: str
    ready: bool  # `begin` may be called

    def begin(self) -> None:
        """Start its ranks. CannotStartError."""

    def signal(self, number: int) -> None:
        """Send it to its ranks."""

    def close(self) -> None:
        """Leave nothing behind."""


class Job:
    """The ranks of all hosts. A `Sink` of theirs.

    Attributes
    ----------
    hosts : of the job, to be added before `run`.
    host_of : names of other hosts, by rank.
    results : what ranks have answered, by rank; in the order in which they began to.
    failed : the rank that gives the job its exit code, and its exit code or minus the signal.
    asked : the signal with which the user has asked for the end.
    """

    def __init__(self, size: int, output: Output, *, grace_s: float) -> None:
        self.selector = selectors.DefaultSelector()
        self.hosts: list[Host] = []
        self.host_of: dict[int, str] = {}
        self.results: dict[int, bytearray] = defaultdict(bytearray)
        self.failed: tuple[int, int] | None = None
        self.asked: int | None = None
        self._size = size
        self._output = output
        self._grace_s = grace_s
        self._codes: dict[int, int] = {}
        self._kill_at: float | None = None
        self._killed = False
        self._begun = False
        self._signals: list[int] = []

    # -----------------------------------------------------------------------------------------
    # What hosts tell

    def output(self, rank: int, stream: str, data: bytes) -> None:
        """As `Sink.output`."""
        if stream == RESULT:
            self.results[rank] += data
        else:
            self._output.write(rank, stream, data)

    def exited(self, rank: int, code: int) -> None:
        """As `Sink.exited`."""
        if rank in self._codes:
            return
        self._codes[rank] = code
        if code == 0 or self._kill_at is not None:
            return
        # Of several at once, one that was killed: the others may have met its end.
        if self.failed is None or (code < 0 < self.failed[1]):
            self.failed = rank, code

    # -----------------------------------------------------------------------------------------
    # Running

    def run(self, start_timeout_s: float, before: Callable[[], None]) -> None:
        """Start the ranks of all hosts, and wait until they have ended.

        Parameters
        ----------
        start_timeout_s : how long hosts may take until they are ready.
        before : called when all are, before the first rank is started.

        Raises
        ------
        CannotStartError : a host was not ready in time, or cannot start its ranks.
        """
        with self._signals_noted():
            try:
                if self._await_hosts(start_timeout_s):
                    before()
                    for host in self.hosts:
                        host.begin()
                    self._begun = True
                    self._await_ranks()
            finally:
                for host in self.hosts:
                    host.close()
                self._output.close()

    def _await_hosts(self, timeout_s: float) -> bool:
        """False: the user has asked for the end."""
        end = time.monotonic() + timeout_s
        while missing := [host.name for host in self.hosts if not host.ready]:
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise CannotStartError(
                    f"no agent answers on {', '.join(missing)} after {timeout_s:g} s "
                    "(--start-timeout)"
                )
            step(self.selector, left_s)
            self._take_signals()
            if self.asked is not None:
                return False
        return True

    def _await_ranks(self) -> None:
        while len(self._codes) < self._size:
            step(self.selector, self._left_s())
            self._take_signals()
            if self.failed and self._kill_at is None:
                self._stop(signal.SIGTERM)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                if self._killed:  # a host that does not answer any more
                    return
                self._kill()

    def _left_s(self) -> float | None:
        if self._kill_at is None:
            return None
        return max(self._kill_at - time.monotonic(), 0.0)

    def _stop(self, number: int) -> None:
        """Ask the others to end, once."""
        self._send(number)
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace_s

    def _kill(self) -> None:
        if not self._killed:
            self._killed = True
            self._kill_at = time.monotonic() + _KILLED_S
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for host in self.hosts:
            host.signal(number)

    # -----------------------------------------------------------------------------------------
    # Signals

    @contextlib.contextmanager
    def _signals_noted(self) -> Iterator[None]:
        """Let signals wake the selector, and keep their numbers."""
        if threading.current_thread() is not threading.main_thread():
            yield  # they are for that one
            return
        reading, writing = socket.socketpair()
        reading.setblocking(False)
        writing.setblocking(False)
        before: dict[int, object] = {}
        self.selector.register(reading, selectors.EVENT_READ, lambda: reading.recv(4096))
        descriptor = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        try:
            for number in (*ENDING, *OTHERS):
                if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                    before[number] = signal.signal(number, self._note)
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)  # type: ignore[arg-type]
            signal.set_wakeup_fd(descriptor)
            self.selector.unregister(reading)
            reading.close()
            writing.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _take_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number in OTHERS:
                self._send(number)
            elif self.asked is None and not self.failed:
                self.asked = number
                self._stop(number)
            else:  # once more: now
                self.asked = self.asked or number
                self._kill()

    # -----------------------------------------------------------------------------------------
    # The end

    def conclude(self) -> int:
        """Say how it has ended, and return the exit code of hororun."""
        if self.asked is not None:
            name = signal.Signals(self.asked).name
            if self._begun and not any(self._codes.values()):
                return 0
            self._output.say(f"ended by {name}")
            return 128 + self.asked
        if self.failed is None:
            return 0
        rank, code = self.failed
        for line in self.epitaph(rank, code):
            self._output.say(line)
        return code if code > 0 else 128 - code

    def epitaph(self, rank: int, code: int) -> list[str]:
        """How a rank has ended, for people: lines."""
        tail = [line.decode("utf-8", "surrogateescape") for line in self._output.tail(rank)]
        last = "; the last lines of its standard error:" if tail else ", and said nothing about it"
        return [f"{self.name(rank)} {describe(code)}{last}", *(f"    {line}" for line in tail)]

    def name(self, rank: int) -> str:
        """The rank, and its host where that is another one."""
        return f"rank {rank}" + (f" on host {self.host_of[rank]}" if rank in self.host_of else "")


def describe(code: int) -> str:
    """How a process has ended, for people."""
    if code >= 0:
        return f"has failed with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
