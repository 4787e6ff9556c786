"""Warm ranks: they run one test or call after the other, and end when one has gone wrong.

Everything happens in the thread that calls. Each wait ends: when all ranks have ended the test,
shortly after one of them has failed, or at the limit.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hororing._job.rendezvous import protocol
from hororing._job.rendezvous.elastic_store import ElasticStore
from hororing._job.rendezvous.store import Store
from hororing.hororun.host.local import memory_file
from hororing.hororun.job import plan as places
from hororing.testing.channel import Closed
from hororing.testing.lender import Lender
from hororing.testing.messages import (
    Answer,
    Begun,
    Call,
    Debugging,
    Doing,
    Ended,
    Failing,
    Finish,
    Hello,
    Killing,
    Phase,
    Test,
    Warned,
    World,
)  # fmt: skip
from hororing.testing.processes import Process, Starter, StartError
from hororing.testing.rank import STACKS

GRACE_S = 0.5  # for the other ranks, after one has failed
_BEGIN_S = 60.0  # until ranks are ready, whatever the limit of the test
_ANSWER_S = 1.0  # to say what a rank is doing
_FINISH_S = 10.0  # to tear down fixtures of modules and sessions
_RUINED_S = 1.0  # the same, after a failure
_MOST_WAIT_S = 3600.0  # in one call of `select`
_MOST_OUTPUT_BYTES = 2**20


@dataclass
class Outcome:
    """What became of a test or a call on one rank."""

    rank: int
    begun: bool = False
    phases: list[Phase] = field(default_factory=list)
    wanted: bool = False  # the test has killed it
    failing: Failing | None = None  # the latest
    answer: bytes = b""
    ended: Ended | None = None  # None: it has died, or was killed here
    died: int | None = None  # its exit code, or minus the signal
    doing: Doing | None = None  # when it was killed here
    output: str = ""  # of the phase in which it died or was killed
    failed_at: float = 0.0  # time.monotonic(); 0: it has not

    @property
    def is_running(self) -> bool:
        """Whether the test has not ended on this rank."""
        return self.ended is None and self.died is None

    @property
    def trouble(self) -> bool:
        """Whether the process has ended, was ended, or left pytest, though nobody wanted that."""
        return not self.wanted and (self.ended is None or bool(self.ended.escaped))

    @property
    def quits(self) -> bool:
        """Whether the user has quit the debugger there."""
        return self.ended is not None and self.ended.quits

    @property
    def failed(self) -> bool:
        """Whether its engine has ended."""
        return self.trouble or any(
            each.blame or each.data["outcome"] == "failed" for each in self.phases
        )


class Pool:
    """Ranks 0 to `size` - 1."""

    def __init__(
        self, starter: Starter, size: int, folder: str = "", *, elastic: bool = False
    ) -> None:
        """Start them. StartError if that is impossible.

        If the job is `elastic`, `size` processes get ranks when they call `init`, and are used for
        one test.
        """
        self.size, self._elastic = size, elastic
        self.usable = True
        self._starter = starter
        self._number = 0
        secret = protocol.new_secret()
        job = secrets.token_hex(8)
        self._store: Store | ElasticStore = (
            ElasticStore(job=job, np=size, min_np=1, max_np=size, secret=secret)
            if elastic
            else Store(job=job, size=size, secret=secret)
        )
        self._store.start_thread()
        files = [memory_file("secret", secret), memory_file("store", b"")]
        self._processes: list[Process] = []
        try:
            self._processes = starter.start(size, self._variables, folder, *files)
            for each in self._processes:
                hello, each.files = each.control.receive(_BEGIN_S)
                assert isinstance(hello, Hello)
        except (Closed, TimeoutError):
            self.close()
            raise StartError(f"{size} ranks did not start") from None
        except BaseException:
            self.close()
            raise
        finally:
            for number in files:
                os.close(number)

    def _variables(self, rank: int) -> dict[str, str]:
        address = f"127.0.0.1:{self._store.port}"
        if self._elastic:
            return {
                "HORORING_ELASTIC": "1", "HORORING_JOB": self._store.job,
                "HORORING_RENDEZVOUS": address, "HORORING_PROCESS": str(rank),
            }  # fmt: skip
        meeting = places.Rendezvous(self._store.job, address, ("127.0.0.1", 0))
        where = places.Place(rank, "localhost", rank, self.size)
        return places.environment(where, self.size, meeting)

    def world(self, backend: str, init: bool) -> World:
        """Return what is initialised for the next test."""
        self._number += 1
        return World(self._number, backend, init, 0 if init else _free_port())

    def run(
        self,
        order: Test | Call,
        limit_s: float,
        warned: Callable[[Warned], None] = lambda _: None,
        lender: Lender | None = None,
    ) -> list[Outcome]:
        """Run it on all ranks; return what became of it, by rank.

        Afterwards the ranks are usable if none has failed. Debuggers get a terminal from `lender`.
        """
        self._lender = lender or Lender(lambda: None)
        outcomes = [Outcome(each.rank) for each in self._processes]
        for each in self._processes:
            each.send(order)
        try:
            self._gather(outcomes, limit_s, warned)
        except BaseException:  # Ctrl-C
            self.close()
            raise
        used_up = self._elastic or any(
            each.failed or each.wanted or each.quits for each in outcomes
        )
        self.usable = not used_up
        return outcomes

    def _gather(
        self, outcomes: list[Outcome], limit_s: float, warned: Callable[[Warned], None]
    ) -> None:
        selector = selectors.DefaultSelector()
        began = time.time()
        last = time.monotonic()
        for process, outcome in zip(self._processes, outcomes, strict=True):
            hear = partial(self._hear, selector, process, outcome, warned)
            selector.register(process.control, selectors.EVENT_READ, hear)
            selector.register(process.pidfd, selectors.EVENT_READ, hear)
        with selector:
            while selector.get_map():
                failed = [each.failed_at for each in outcomes if each.failed_at]
                unharmed = any(each.is_running and not each.failed_at for each in outcomes)
                begun = all(each.begun for each in outcomes)
                until = last + (limit_s if begun else max(limit_s, _BEGIN_S))
                if failed and unharmed:
                    until = min(failed) + GRACE_S
                if self._lender.is_lent:
                    until = math.inf
                events = selector.select(min(max(until - time.monotonic(), 0.0), _MOST_WAIT_S))
                if not events and time.monotonic() >= until:
                    self._ask_all(outcomes, began)
                    if (failed and unharmed) or not _is_importing(outcomes, began):
                        break
                    last = time.monotonic()
                for key, _ in events:
                    if selector.get_map().get(key.fd) == key and key.data():
                        last = time.monotonic()
        for outcome in outcomes:
            if outcome.is_running:
                self._processes[outcome.rank].kill()

    def _ask_all(self, outcomes: list[Outcome], since: float) -> None:
        for outcome in outcomes:
            if outcome.is_running:
                process = self._processes[outcome.rank]
                outcome.doing = self._ask(process, since)
                outcome.output = _texts(process.files[1:])

    def _hear(
        self,
        selector: selectors.BaseSelector,
        process: Process,
        outcome: Outcome,
        warned: Callable[[Warned], None],
    ) -> bool:
        """Take a message of a rank; return whether it has come further."""
        message: object = None
        with contextlib.suppress(Closed, TimeoutError):
            message = process.control.receive(1.0)[0]
        if isinstance(message, Begun):
            outcome.begun = True
            return True
        if isinstance(message, Failing):
            outcome.failing = message
            outcome.failed_at = outcome.failed_at or message.at
            return True
        if isinstance(message, Phase):
            outcome.phases.append(message)
            return True
        if isinstance(message, Killing):
            outcome.wanted = True
            return True
        if isinstance(message, Warned):
            warned(message)
            return False
        if isinstance(message, Debugging):
            self._lender.hear(process, message)
            return True
        if isinstance(message, Answer):
            outcome.answer = message.body
            return True
        self._lender.take_back(process.rank)
        selector.unregister(process.control)
        selector.unregister(process.pidfd)
        if isinstance(message, Ended):
            outcome.ended = message
            outcome.output = _texts(process.files[1:]) if outcome.answer else ""
            if message.escaped or message.quits:
                outcome.failed_at = time.monotonic()
        else:
            outcome.failed_at = 0.0 if outcome.wanted else time.monotonic()
            process.kill()
            outcome.output = _texts(process.files[1:])
            outcome.doing = Doing("", "", 0, _texts(process.files[:1]))
            outcome.died = self._reap(process)
        return True

    def _reap(self, process: Process) -> int:
        code = self._starter.ended(process)
        process.pidfd = -1
        return code

    def _ask(self, process: Process, since: float) -> Doing:
        """What a rank is doing, by itself or, if its interpreter is held, by faulthandler."""
        try:
            process.watch.send(since)
            doing = process.watch.receive(_ANSWER_S)[0]
            assert isinstance(doing, Doing)
        except (Closed, TimeoutError):
            before = os.fstat(process.files[0]).st_size
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(process.pidfd, STACKS)
            until = time.monotonic() + _ANSWER_S
            while os.fstat(process.files[0]).st_size == before and time.monotonic() < until:
                time.sleep(0.01)
            doing = Doing("", "", 0, _texts(process.files[:1]))
        return doing

    def finish(self) -> str:
        """Tear down what is left and end the ranks; return the error of that, or ""."""
        idle = [each for each in self._processes if each.pidfd >= 0]
        for each in idle:
            each.send(Finish())
        problem = ""
        until = time.monotonic() + (_FINISH_S if self.usable else _RUINED_S)
        for each in idle:
            try:
                each.control.receive(max(until - time.monotonic(), 0.01))
            except Closed:
                problem = problem or f"rank {each.rank} has ended while it tore down its fixtures"
            except TimeoutError:
                problem = problem or f"rank {each.rank} did not tear down its fixtures in time"
        self.close()
        return problem

    def close(self) -> None:
        """End the ranks at once."""
        self.usable = False
        alive = [each for each in self._processes if each.pidfd >= 0]
        for each in alive:
            each.kill()
        for each in alive:
            self._reap(each)
        self._processes = []
        self._store.stop()


def _is_importing(outcomes: list[Outcome], began: float) -> bool:
    """Whether a rank imports a module: it does not hang, even if that takes a minute."""
    stacks = [each.doing.stack for each in outcomes if each.is_running and each.doing]
    return time.time() - began < _BEGIN_S and any("<frozen importlib" in each for each in stacks)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _texts(files: list[int]) -> str:
    data = [os.pread(each, _MOST_OUTPUT_BYTES, 0) for each in files]
    return b"".join(data).decode("utf-8", "replace").strip("\0")
