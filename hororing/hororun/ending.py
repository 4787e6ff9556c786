"""How the processes of a job are asked to end, and ended, and which signals ask for that."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

# Sent on as they are. Of the first, each asks for the end.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
OTHERS = (signal.SIGUSR1, signal.SIGUSR2)
# For a host to tell that its ranks are dead, when they have been killed.
_KILLED_S = 10.0


class Ending:
    """First a signal that asks for it, after the time of grace SIGKILL. Signals here are sent on.

    Parameters
    ----------
    selector : what the thread of the job waits in; signals wake it.
    send : sends a signal to all processes of the job.
    grace_s : between the request to end and the end.

    Attributes
    ----------
    asked : the signal with which the user has asked for the end.
    begun : processes have been asked to end.
    """

    def __init__(
        self, selector: selectors.BaseSelector, send: Callable[[int], None], grace_s: float
    ) -> None:
        self.asked: int | None = None
        self._selector = selector
        self._send = send
        self._grace_s = grace_s
        self._at: float | None = None  # of the next step
        self._killed = False
        self._signals: list[int] = []

    @property
    def begun(self) -> bool:
        """Whether the end has begun."""
        return self._at is not None

    def left_s(self) -> float | None:
        """Time until `go_on` has something to do; None: nothing."""
        return None if self._at is None else max(self._at - time.monotonic(), 0.0)

    def stop(self, number: int) -> None:
        """Ask all to end."""
        self._send(number)
        if self._at is None:
            self._at = time.monotonic() + self._grace_s

    def go_on(self) -> bool:
        """Kill processes whose time is over. False: that was long ago; a host does not answer."""
        if self._at is None or time.monotonic() < self._at:
            return True
        if self._killed:
            return False
        self._kill()
        return True

    def _kill(self) -> None:
        if not self._killed:
            self._killed = True
            self._at = time.monotonic() + _KILLED_S
            self._send(signal.SIGKILL)

    @contextlib.contextmanager
    def signals_noted(self) -> Iterator[None]:
        """Let signals wake the selector, and keep their numbers. In the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield  # they are for that one
            return
        reading, writing = socket.socketpair()
        reading.setblocking(False)
        writing.setblocking(False)
        before: dict[int, object] = {}
        self._selector.register(reading, selectors.EVENT_READ, lambda: reading.recv(4096))
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
            self._selector.unregister(reading)
            reading.close()
            writing.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def take_signals(self, failed: bool) -> None:
        """Do what signals ask for. `failed`: the job ends already."""
        while self._signals:
            number = self._signals.pop(0)
            if number in OTHERS:
                self._send(number)
            elif self.asked is None and not failed:
                self.asked = number
                self.stop(number)
            else:  # once more: now
                self.asked = self.asked or number
                self._kill()
