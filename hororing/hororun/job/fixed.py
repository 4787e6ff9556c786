"""A job of a fixed number of ranks, from the start to the exit code.

The first failed rank determines the job's exit code. The others are then asked to end, and killed
after the time of grace; the same happens when hororun is asked to end.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from hororing.hororun.host.local import CannotStartError, ProcessHost, Program
from hororing.hororun.host.output import Output
from hororing.hororun.job.ending import Grace, conclude_asked, describe, end_report, way_out
from hororing.hororun.job.job import Job, JobHost, MakeHost
from hororing.hororun.job.plan import Place

_LOOK_S = 1.0  # between two looks at ranks that have not ended as others have
# In the error of a rank that has lost another one.
_NAMES = re.compile(rb"PeerLostError: .*?rank (\d+)")


class FixedJob(Job):
    """All ranks start together, once every host is ready.

    Parameters
    ----------
    placed : the places of the ranks.
    elsewhere : some ranks are on other hosts.
    output, make_host, grace, start_timeout_s : see `Job`.
    make_programs : returns the programs of each host, by name, once all are ready.
    on_finished : called with each rank whose process ends with exit code 0.

    Attributes
    ----------
    failed : the rank that determines the exit code, and its exit code or minus the signal.
    remark : printed at the end of a job without failure, if it is not empty.
    """

    def __init__(
        self,
        placed: Sequence[Place],
        output: Output,
        *,
        elsewhere: bool,
        make_host: MakeHost,
        make_programs: Callable[[Mapping[str, ProcessHost]], Mapping[str, Sequence[Program]]],
        grace: Grace,
        start_timeout_s: float,
        on_finished: Callable[[int], None],
    ) -> None:
        super().__init__(output, make_host, grace, start_timeout_s)
        self.failed: tuple[int, int] | None = None
        self.remark = ""
        self._host_of = {place.rank: place.host for place in placed}
        self._elsewhere = elsewhere
        self._make_programs, self._on_finished = make_programs, on_finished
        self._codes: dict[int, int] = {}
        self._begun = False
        self._stopped_since: float | None = None

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

    def _host_ended(self, name: str, host: JobHost, text: str) -> None:
        if not self._begun:
            raise CannotStartError(text)
        if any(self._host_of[rank] == name for rank in self._running()):
            self._output.log(text)

    def _find_hosts(self) -> None:
        for name in dict.fromkeys(self._host_of.values()):
            self._reach(name)

    def _start_due(self) -> None:
        if self._begun:
            return
        missing = {name: host for name, host in self._hosts.items() if not host.of.ready}
        if not missing:
            programs = self._make_programs({name: host.of for name, host in self._hosts.items()})
            self._begun = True
            for name, host in self._hosts.items():
                host.of.start(programs[name])
        elif time.monotonic() >= max(host.ready_by for host in missing.values()):
            raise CannotStartError(self._unanswered(missing))

    def _left_s(self) -> float | None:
        if not self._begun:
            return max(max(host.ready_by for host in self._hosts.values()) - time.monotonic(), 0.0)
        lefts = [self._ending.left_s(), self._output.due_s(), _LOOK_S if self._codes else None]
        return min((each for each in lefts if each is not None), default=None)

    def _judge(self) -> None:
        self._look_for_stopped()
        if self.failed and not self._ending.begun:
            self._ending.stop(signal.SIGTERM)

    def _look_for_stopped(self) -> None:
        """End the job if all ranks have ended but some that a signal has stopped."""
        if not self._codes or self.failed or self._ending.begun:
            return
        left = set(self._running())
        stopped = {rank for host in self._hosts.values() for rank in host.of.stopped()}
        if not left or not left <= stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = time.monotonic()
        elif time.monotonic() - self._stopped_since >= self._grace_s:
            self.failed = min(left), -signal.SIGSTOP
            self._ending.stop(signal.SIGKILL)

    def _is_over(self) -> bool:
        return not self._running() if self._begun else self.asked is not None

    def _is_failing(self) -> bool:
        return self.failed is not None

    def _running(self) -> list[int]:
        return [rank for rank in self._host_of if rank not in self._codes]

    def _left(self) -> list[str]:
        return [self.name(rank) for rank in self._running()]

    def _last_words(self) -> int | None:
        return None if self.failed is None else self._cause(self.failed[0])

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
        """The rank, and its host if not all are on this one."""
        return f"rank {rank}" + (f" on host {self._host_of[rank]}" if self._elsewhere else "")
