"""How a job's processes are asked to end, then killed; which signals request it; what is said."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from hororing.hororun.host.output import Output

# Forwarded unchanged. Each of the first group requests the end.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
OTHERS = (signal.SIGUSR1, signal.SIGUSR2)
# Time for a host to report that its killed ranks are dead.
KILLED_S = 10.0
_NAMED = 16  # of those that are killed


@dataclass(frozen=True)
class Grace:
    """Time between the request to end and SIGKILL.

    Parameters
    ----------
    failed_s : if a rank has failed.
    asked_s : if the user or a scheduler requests it: ranks may be saving their state. Schedulers
        allow 30 s, if nothing else is set up.
    """

    failed_s: float = 5.0
    asked_s: float = 30.0


class Ending:
    """First sends a signal that requests the end, then SIGKILL. Forwards signals to processes.

    Parameters
    ----------
    selector : what the thread of the job waits on; signals wake it.
    send : sends a signal to all processes of the job.
    grace : see there.
    output : the job's; it waits for readers no longer than the end allows.
    left : returns the names of processes that have not ended.

    Attributes
    ----------
    asked : the signal with which the user has requested the end.
    begun : processes have been asked to end.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        send: Callable[[int], None],
        grace: Grace,
        output: Output,
        left: Callable[[], Sequence[str]],
    ) -> None:
        self.asked: int | None = None
        self._selector = selector
        self._send = send
        self._grace, self._output, self._left = grace, output, left
        self._first = 0  # the signal with which the end began
        self._at: float | None = None  # of the next step
        self._killed = False
        self._signals: list[int] = []
        output.is_to_end = lambda: self.asked is not None or bool({*ENDING} & {*self._signals})

    @property
    def begun(self) -> bool:
        """Whether the end has begun."""
        return self._at is not None

    def left_s(self) -> float | None:
        """Return the time until `go_on` has something to do, or None if it has nothing."""
        return None if self._at is None else max(self._at - time.monotonic(), 0.0)

    def stop(self, number: int) -> None:
        """Ask all processes to end."""
        self._send(number)
        if self._at is None:
            self._first = number
            self._at = time.monotonic() + self._grace_s()

    def go_on(self) -> bool:
        """Kill processes whose time is over. False: long over; a host does not answer."""
        if self._at is None or time.monotonic() < self._at:
            return True
        if self._killed:
            return False
        if names := self._left():
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            self._output.log(
                f"{', '.join(names[:_NAMED])}{more} had not ended {self._grace_s():g} s after "
                f"{signal.Signals(self._first).name} and will be killed; --grace allows longer"
            )
        self._kill()
        return True

    def _grace_s(self) -> float:
        return self._grace.failed_s if self.asked is None else self._grace.asked_s

    def _kill(self) -> None:
        if not self._killed:
            self._killed = True
            self._at = time.monotonic() + KILLED_S
            self._send(signal.SIGKILL)

    @contextlib.contextmanager
    def signals_noted(self) -> Iterator[None]:
        """Let signals wake the selector, and record them. Only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield  # the main thread handles them
            return
        reading, writing = socket.socketpair()
        reading.setblocking(False)
        writing.setblocking(False)
        before: dict[int, object] = {}
        self._selector.register(reading, selectors.EVENT_READ, lambda: reading.recv(4096))
        descriptor = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        try:
            for number in (*ENDING, *OTHERS):
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it, for example
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
        """Handle recorded signals. `failed`: the job is ending already."""
        while self._signals:
            number = self._signals.pop(0)
            if number in OTHERS:
                self._send(number)
            elif self.asked is None and not failed:
                self.asked = number
                self.stop(number)
            else:  # a second request: now
                self.asked = self.asked or number
                self._kill()


def conclude_asked(asked: int, codes: Collection[int | None], output: Output) -> int:
    """The exit code of a job ended by a signal, whose processes ended with `codes`."""
    if not any(codes):
        return 0
    output.log(f"ended by {signal.Signals(asked).name}")
    return 128 + asked


def end_report(how: str, code: int, tail: Sequence[bytes], whose: str = "its") -> list[str]:
    """Lines for the user: how a process has ended, and the last lines of its standard error."""
    last = (
        f"; the last lines of {whose} standard error:" if tail else "; its standard error is empty"
    )
    lines = (line.decode("utf-8", "surrogateescape") for line in tail)
    hint = "an unexpected SIGKILL is usually the kernel's, out of memory: see `dmesg`"
    killed = code == -signal.SIGKILL
    return [how + last, *(f"    {line}" for line in lines), *([hint] if killed else [])]


def way_out(tail: Sequence[bytes]) -> list[str]:
    """Lines for the user: what to do about an error of Python's own."""
    if any(b"ModuleNotFoundError: No module named 'horovod" in line for line in tail):
        return ["a script that imports horovod runs under horovodrun, or by python -m "
                "hororing.as_horovod script (docs/migrating.md)"]  # fmt: skip
    return []


def describe(code: int) -> str:
    """Describe how a process has ended."""
    if code >= 0:
        return f"has failed with exit code {code}"
    if code == -signal.SIGSTOP:
        return "was stopped by a signal, did not go on after all others had ended, and was killed"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
