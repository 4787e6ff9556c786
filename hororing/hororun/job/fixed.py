"""A job of several ranks, from the start to the exit code.

The first failed rank determines the job's exit code. The others are then asked to end, and killed
after the time of grace; the same happens when hororun is asked to end. Any thread can run a job;
signals are recorded only in the main thread.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from hororing.hororun.host.local import RESULT, step
from hororing.hororun.host.output import Output
from hororing.hororun.job.ending import Ending, Grace

_LOOK_S = 1.0  # between two looks at ranks that have not ended as others have
# In the error of a rank that has lost another one.
_NAMES = re.compile(rb"PeerLostError: .*?rank (\d+)")


class CannotStartError(Exception):
    """The job cannot be started; the text says why."""


class Host(Protocol):
    """The ranks of a host, as seen by this process."""

    name: str
    ready: bool  # `begin` may be called

    def begin(self) -> None:
        """Start its ranks. CannotStartError."""

    def signal(self, number: int) -> None:
        """Send a signal to its ranks."""

    def stopped(self) -> set[int]:
        """Those of its ranks that a signal has stopped, as far as this process can see."""

    def close(self) -> None:
        """Clean up."""


class Job:
    """The ranks of all hosts, and their `Sink`.

    `on_finished` is called with each rank whose process ends with exit code 0.

    Attributes
    ----------
    hosts : of the job, to be added before `run`.
    host_of : names of other hosts, by rank.
    results : the ranks' answers, in the order in which their first bytes arrived.
    failed : the rank that determines the exit code, and its exit code or minus the signal.
    remark : printed at the end of a job without failure, if it is not empty.
    """

    def __init__(
        self,
        size: int,
        output: Output,
        *,
        grace: Grace,
        on_finished: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self.selector = selectors.DefaultSelector()
        self.hosts: list[Host] = []
        self.host_of: dict[int, str] = {}
        self.results: dict[int, bytearray] = defaultdict(bytearray)
        self.failed: tuple[int, int] | None = None
        self.remark = ""
        self._size = size
        self._output = output
        self._on_finished = on_finished
        self._codes: dict[int, int] = {}
        self._begun = False
        self._grace_s = grace.failed_s
        self._stopped_since: float | None = None
        self._ending = Ending(self.selector, self._send, grace, output, self._left)

    @property
    def asked(self) -> int | None:
        """The signal with which the user has requested the end."""
        return self._ending.asked

    # -----------------------------------------------------------------------------------------
    # Called by hosts

    def output(self, rank: int, stream: str, data: bytes) -> None:
        """See `Sink.output`."""
        if stream == RESULT:
            self.results[rank] += data
        else:
            self._output.write(rank, stream, data)

    def exited(self, rank: int, code: int) -> None:
        """See `Sink.exited`."""
        if rank in self._codes:
            return
        self._codes[rank] = code
        self._output.ended(rank, failed=code != 0)
        if code == 0:
            self._on_finished(rank)
        if code == 0 or self._ending.begun:
            return
        # If several end at once, blame one that was killed: it may have caused the others' ends.
        if self.failed is None or (code < 0 < self.failed[1]):
            self.failed = rank, code

    # -----------------------------------------------------------------------------------------
    # Running

    def run(self, start_timeout_s: float, before: Callable[[], None]) -> None:
        """Start the ranks of all hosts, and wait until they have ended.

        Parameters
        ----------
        start_timeout_s : how long hosts may take until they are ready.
        before : called when all are ready, before the first rank is started.

        Raises
        ------
        CannotStartError : a host was not ready in time, or cannot start its ranks.
        """
        with self._ending.signals_noted():
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
                cause = self._cause(self.failed[0]) if self.failed else None
                self._output.fold(cause, interrupted=self.asked is not None)
                self._output.close()

    def _await_hosts(self, timeout_s: float) -> bool:
        """Wait until all hosts are ready. False: the user has requested the end."""
        end = time.monotonic() + timeout_s
        while missing := [host.name for host in self.hosts if not host.ready]:
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise CannotStartError(
                    f"no agent answers on {', '.join(missing)} after {timeout_s:g} s "
                    "(--start-timeout)"
                )
            step(self.selector, left_s)
            self._ending.take_signals(failed=False)
            if self.asked is not None:
                return False
        return True

    def _await_ranks(self) -> None:
        while len(self._codes) < self._size:
            some_ended = bool(self._codes) and not self._ending.begun
            lefts = [_LOOK_S] if some_ended else [self._ending.left_s(), self._output.due_s()]
            step(self.selector, min((each for each in lefts if each is not None), default=None))
            self._output.show_due()
            self._ending.take_signals(failed=self.failed is not None)
            self._look_for_stopped()
            if self.failed and not self._ending.begun:
                self._ending.stop(signal.SIGTERM)
            if not self._ending.go_on():
                return

    def _look_for_stopped(self) -> None:
        """End the job if all ranks have ended but some that a signal has stopped."""
        if not self._codes or self.failed or self._ending.begun:
            return
        left = set(range(self._size)) - self._codes.keys()
        if not left or not left <= {rank for host in self.hosts for rank in host.stopped()}:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = time.monotonic()
        elif time.monotonic() - self._stopped_since >= self._grace_s:
            self.failed = min(left), -signal.SIGSTOP
            self._ending.stop(signal.SIGKILL)

    def _left(self) -> list[str]:
        return [self.name(rank) for rank in range(self._size) if rank not in self._codes]

    def _send(self, number: int) -> None:
        for host in self.hosts:
            host.signal(number)

    # -----------------------------------------------------------------------------------------
    # The end

    def conclude(self) -> int:
        """Print how the job has ended, and return the exit code of hororun."""
        if self.asked is not None:
            codes = list(self._codes.values()) if self._begun else [1]
            return conclude_asked(self.asked, codes, self._output)
        if self.failed is None:
            if self.remark:
                self._output.log(self.remark)
            return 0
        rank, code = self.failed
        how, cause = self._how(rank, code)
        tail = self._output.repeats(cause)
        lines = self.end_report(rank, code) if tail or not self._output.tail(cause) else [how]
        for line in [*lines, *way_out(self._output.tail(cause))]:
            self._output.log(line)
        return code if code > 0 else 128 - code

    def end_report(self, rank: int, code: int) -> list[str]:
        """Lines for the user: how a rank has ended."""
        how, cause = self._how(rank, code)
        whose = "its" if cause == rank else f"rank {cause}'s"
        return end_report(how, code, self._output.tail(cause), whose)

    def _how(self, rank: int, code: int) -> tuple[str, int]:
        how, cause = f"{self.name(rank)} {describe(code)}", self._cause(rank)
        if cause != rank:
            how += f", because of {self.name(cause)}"
        elif (named := self._named(rank)) is not None and self._codes.get(named) == 0:
            how += f", because {self.name(named)} had ended with exit code 0 before (os._exit?)"
        return how, cause

    def _cause(self, rank: int) -> int:
        """The rank that the last lines of `rank` name, if it has failed and printed something."""
        seen = {rank}
        while (named := self._named(rank)) is not None:
            if named in seen or not self._codes.get(named) or not self._output.tail(named):
                break
            seen.add(named)
            rank = named
        return rank

    def _named(self, rank: int) -> int | None:
        found = _NAMES.findall(b"\n".join(self._output.tail(rank)))
        return int(found[-1]) if found else None

    def name(self, rank: int) -> str:
        """The rank, and its host if that is another one."""
        return f"rank {rank}" + (f" on host {self.host_of[rank]}" if rank in self.host_of else "")


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
