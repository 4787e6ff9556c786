"""What every job is: processes on hosts, and a loop until all have ended."""

from __future__ import annotations

import selectors
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hororing.hororun.host.local import RESULT, ProcessHost, step
from hororing.hororun.host.output import Output
from hororing.hororun.job.ending import Ending, Grace

MakeHost = Callable[[Any, str, Callable[[str], None]], ProcessHost]


@dataclass(eq=False)
class JobHost:
    """A host of a job."""

    of: ProcessHost
    ready_by: float  # the agent must have answered
    leaves: bool = False  # it is to be used no more


class Job:
    """A `Sink` of its processes. Any thread can run it; only the main thread records signals.

    Parameters
    ----------
    output : of the processes.
    make_host : makes the object for the host of a name, for this job, which calls a given function
        when the host can no longer be reached. CannotStartError.
    grace : time between the request to end and SIGKILL.
    start_timeout_s : how long an agent may take to answer.

    Attributes
    ----------
    results : the processes' RESULT, by rank, in the order in which their first bytes arrived. In an
        elastic job, by number.
    """

    def __init__(
        self, output: Output, make_host: MakeHost, grace: Grace, start_timeout_s: float
    ) -> None:
        self.selector = selectors.DefaultSelector()
        self.results: dict[int, bytearray] = defaultdict(bytearray)
        self._output, self._make_host = output, make_host
        self._grace_s, self._start_timeout_s = grace.failed_s, start_timeout_s
        self._hosts: dict[str, JobHost] = {}
        self._ending = Ending(self.selector, self._send, grace, output, self._left)

    @property
    def asked(self) -> int | None:
        """The signal with which the user has requested the end."""
        return self._ending.asked

    def output(self, rank: int, stream: str, data: bytes) -> None:
        """See `Sink.output`."""
        if stream == RESULT:
            self.results[rank] += data
        else:
            self._output.write(rank, stream, data)

    def run(self) -> None:
        """Run it until all processes have ended.

        CannotStartError : there are no hosts, one does not answer, or a program cannot be started.
        """
        with self.selector, self._ending.signals_noted():
            try:
                self._find_hosts()
                while not self._is_over():
                    self._start_due()
                    step(self.selector, self._left_s())
                    self._output.show_due()
                    self._ending.take_signals(failed=self._is_failing())
                    self._judge()
                    if not self._ending.go_on():
                        break  # a host no longer answers
            finally:
                self._close()
                self._output.fold(self._last_words(), interrupted=self.asked is not None)
                self._output.close()

    def _reach(self, name: str) -> JobHost:
        host: JobHost
        ready_by = time.monotonic() + self._start_timeout_s
        of = self._make_host(self, name, lambda text: self._host_ended(name, host, text))
        self._hosts[name] = host = JobHost(of, ready_by)
        return host

    def _unanswered(self, names: Iterable[str]) -> str:
        return (
            f"no agent answers on {', '.join(names)} after {self._start_timeout_s:g} s "
            "(--start-timeout)"
        )

    def _send(self, number: int) -> None:
        for host in self._hosts.values():
            host.of.signal(number)

    def _close(self) -> None:
        for host in self._hosts.values():
            host.of.close()

    # -----------------------------------------------------------------------------------------
    # Implemented by the kinds of jobs

    def exited(self, rank: int, code: int) -> None:
        """See `Sink.exited`."""
        raise NotImplementedError

    def _host_ended(self, name: str, host: JobHost, text: str) -> None:
        """The agent has ended; it reports the ends of its processes next."""
        raise NotImplementedError

    def _find_hosts(self) -> None:
        """Begin to reach the hosts."""
        raise NotImplementedError

    def _start_due(self) -> None:
        """Start the processes whose hosts are ready."""
        raise NotImplementedError

    def _left_s(self) -> float | None:
        """Return the time until the next action that no event triggers."""
        raise NotImplementedError

    def _judge(self) -> None:
        """Draw the conclusions from what has happened."""
        raise NotImplementedError

    def _is_over(self) -> bool:
        raise NotImplementedError

    def _left(self) -> Sequence[str]:
        """Return the names of the processes that have not ended."""
        raise NotImplementedError

    def _is_failing(self) -> bool:
        """Whether the job ends already, so that a signal hastens it."""
        return self._ending.begun

    def _last_words(self) -> int | None:
        """Return the process whose last words come last."""
        return None
