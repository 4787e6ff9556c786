"""The two kinds of hosts of a job: this one, and others with an agent started through ssh."""

from __future__ import annotations

import base64
import contextlib
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hororing._job import limits
from hororing._job.rendezvous import protocol
from hororing._job.rendezvous.protocol import Frames, ProtocolError
from hororing.hororun.host.agent import MARK
from hororing.hororun.host.local import (
    CannotStartError,
    LocalRanks,
    Program,
    Sink,
    memory_file,
    start,
)

_READ_BYTES = 2**16
_PART_BYTES = 2**19  # of a payload, per frame
_CLOSE_S = 10.0
ASK_S = 1.0  # between two questions for a sign of life
LOST = 255  # exit code of ranks whose host does not answer, like that of ssh
_MAX_GREETING_BYTES = 2**16
# The folder of this package, which must not appear in the ranks' PYTHONPATH.
_AGENT = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r}); "
    "from hororing.hororun.host.agent import main; main()"
)


class LocalHost:
    """The ranks on this host."""

    def __init__(self, selector: selectors.BaseSelector, sink: Sink, secret: bytes) -> None:
        self.ready = True
        self.hostname = socket.gethostname()  # the name that ranks use
        self._ranks = LocalRanks(selector, sink)
        self._secret = secret

    def start(self, programs: Sequence[Program]) -> None:
        """Like `ProcessHost.start`."""
        descriptor = memory_file("secret", self._secret)
        try:
            for program in programs:
                own = {**program.environment, "HORORING_SECRET_FD": str(descriptor)}
                self._ranks.start(replace(program, environment=own), descriptor)
        except OSError as error:
            raise CannotStartError(limits.why_not_started(error, programs[0].command[0])) from None
        finally:
            os.close(descriptor)

    def signal(self, number: int, rank: int | None = None) -> None:
        """Like `ProcessHost.signal`."""
        self._ranks.signal(number, rank)

    def reap(self, rank: int) -> None:
        """Like `local.LocalRanks.reap`."""
        self._ranks.reap(rank)

    def stopped(self) -> set[int]:
        """Like `ProcessHost.stopped`."""
        return self._ranks.stopped()

    def silent_s(self) -> float:
        """Return 0: this process is alive."""
        return 0.0

    def close(self) -> None:
        """Like `ProcessHost.close`."""
        self._ranks.close()


class RemoteHost:
    """The agent on another host, started through ssh or the command `rsh`.

    Parameters
    ----------
    rsh : the words before the host's name.
    log : prints a line of the launcher.
    compared : variables that the ranks do not get; shared by all hosts. The first host that has
        another value is named, and the variable is no longer compared.
    payload : the standard input of its ranks.
    on_end : called with a message when the agent or the connection has ended, before its ranks
        count as failed.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        sink: Sink,
        secret: bytes,
        *,
        name: str,
        rsh: Sequence[str],
        log: Callable[[str], None],
        compared: dict[str, str],
        payload: bytes | None,
        on_end: Callable[[str], None],
    ) -> None:
        self.name = name
        self.ready = False
        self.hostname = name
        self.port = 0  # a free port of that host, once it is ready
        self._selector = selector
        self._sink = sink
        self._secret = secret
        self._log = log
        self._compared = compared
        self._payload = memoryview(payload or b"")  # until the agent has it
        self._on_end = on_end
        self._running: set[int] = set()
        self._greeting: bytes | None = b""
        self._unsent = bytearray()
        self._frames = Frames()
        self._error = ""
        self._try = f"ssh {name} true" if rsh[0] == "ssh" else shlex.join([*rsh, name, "true"])
        self._asked_at: float | None = None  # for a sign of life, and not answered yet
        self._ask_again_at = 0.0
        try:
            self._popen = start(
                [*rsh, name, shlex.join([sys.executable, "-c", _AGENT])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise CannotStartError(limits.why_not_started(error, rsh[0])) from None
        pipes = self._popen.stdin, self._popen.stdout, self._popen.stderr
        assert None not in pipes
        self._in, self._out, self._err = (pipe for pipe in pipes if pipe is not None)
        for stream, call in ((self._out, self._read_agent), (self._err, self._read_rsh)):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, call)
        os.set_blocking(self._in.fileno(), False)

    def start(self, programs: Sequence[Program]) -> None:
        """Like `ProcessHost.start`. A failure is reported later, as the ranks' end."""
        self._running.update(program.rank for program in programs)
        payload, self._payload = self._payload, memoryview(b"")
        for begin in range(0, len(payload), _PART_BYTES):
            part = base64.b64encode(payload[begin : begin + _PART_BYTES])
            self._send({"payload": part.decode()})
        first = programs[0]
        shared = dict(set.intersection(*(set(each.environment.items()) for each in programs)))
        try:
            self._send(
                {
                    "secret": self._secret.hex(), "compared": self._compared,
                    "directory": first.directory, "command": list(first.command),
                    "environment": shared, "sharing": first.sharing,
                    "ranks": [
                        {
                            "rank": each.rank,
                            "environment": dict(each.environment.items() - shared.items()),
                        }
                        for each in programs
                    ],
                }
            )  # fmt: skip
        except ValueError:
            raise CannotStartError("the command and its variables are too long") from None

    def signal(self, number: int, rank: int | None = None) -> None:
        """Like `ProcessHost.signal`."""
        if self.ready:
            self._send({"signal": number, "rank": rank})

    def reap(self, rank: int) -> None:
        """Like `local.LocalRanks.reap`."""
        self._send({"reap": rank})

    def stopped(self) -> set[int]:
        """Like `ProcessHost.stopped`: unknown."""
        return set()

    def silent_s(self) -> float:
        """Ask the agent for a sign of life; return for how long it has not answered."""
        now = time.monotonic()
        if self._asked_at is None and now >= self._ask_again_at:
            self._asked_at, self._ask_again_at = now, now + ASK_S
            self._send({"alive": True})
        return 0.0 if self._asked_at is None else now - self._asked_at

    def close(self) -> None:
        """Like `ProcessHost.close`. Waits some seconds until the agent has ended its ranks."""
        if self._in.closed:
            return
        self._send({"close": True})
        self._forget_unsent()
        self._in.close()
        end = time.monotonic() if self._asked_at is None else self._asked_at
        end += _CLOSE_S if self.ready else 0.0
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._out, selectors.EVENT_READ)
            while (left_s := end - time.monotonic()) > 0:
                if waiting.select(left_s) and not self._take():
                    break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)  # also the processes that it has started
        self._popen.wait()
        for stream in (self._out, self._err):
            with contextlib.suppress(KeyError):
                self._selector.unregister(stream)
            stream.close()

    def _send(self, message: dict[str, Any]) -> None:
        idle = not self._unsent
        self._unsent += protocol.encode(message)
        if idle:
            self._selector.register(self._in, selectors.EVENT_WRITE, self._send_on)
        self._send_on()

    def _send_on(self) -> None:
        """Send as much as possible without blocking."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self._in.fileno(), self._unsent)]
        except BlockingIOError:
            return
        except OSError:  # it has ended; `_read` reports that
            pass
        self._forget_unsent()

    def _forget_unsent(self) -> None:
        self._unsent.clear()
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._in)

    def _read_rsh(self) -> None:
        """Print the messages of ssh or the agent."""
        text = os.read(self._err.fileno(), _READ_BYTES)
        if not text:
            self._selector.unregister(self._err)
        for line in text.decode("utf-8", "replace").splitlines():
            self._log(f"{self.name}: {line}")

    def _read_agent(self) -> None:
        if not self._take():
            self._selector.unregister(self._out)
            self._ended()

    def _take(self) -> bool:
        """Read from the agent; False: it has closed the connection."""
        data = os.read(self._out.fileno(), _READ_BYTES)
        self._asked_at = None
        try:
            for message in self._frames.feed(self._skip_greeting(data)):
                self._about(message)
        except (ProtocolError, ValueError) as error:
            self._error = f"its agent sent an invalid message: {error}"
            return False
        return bool(data)

    def _skip_greeting(self, data: bytes) -> bytes:
        """Skip the output of login scripts before the agent's mark."""
        if self._greeting is None:
            return data
        self._greeting += data
        found = self._greeting.find(MARK)
        if found < 0:
            if len(self._greeting) > _MAX_GREETING_BYTES:
                raise ProtocolError(repr(self._greeting[-200:]))
            return b""
        rest = self._greeting[found + len(MARK) :]
        self._greeting = None
        return rest

    def _about(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.port = protocol.take(message, "ready", int)
            self.ready = True
        elif "differs" in message:
            name = protocol.take(message, "differs", str)
            if self._compared.pop(name, None) is not None:
                self._log(
                    f"{name} has another value on {self.name}, where ranks do not get that of this "
                    f"host: -x {name} passes it"
                )
        elif "error" in message:
            self._error = protocol.take(message, "error", str)
            self._ended()
        elif "alive" in message:
            pass
        elif "code" in message:
            rank = protocol.take(message, "rank", int)
            self._running.discard(rank)
            self._sink.exited(rank, protocol.take(message, "code", int))
        else:
            rank = protocol.take(message, "rank", int)
            data = base64.b64decode(protocol.take(message, "data", str))
            self._sink.output(rank, protocol.take(message, "stream", str), data)

    def _ended(self) -> None:
        """The agent or the connection has ended: its ranks count as failed."""
        why = f"the connection with hororun's agent there has ended; try: {self._try}"
        if not self.ready:
            why = f"it cannot be reached, or cannot run hororing; try: {self._try}"
        self._on_end(f"host {self.name}: {self._error or why}")
        for rank in sorted(self._running):
            self._sink.exited(rank, LOST)
        self._running.clear()
