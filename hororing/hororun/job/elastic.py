"""An elastic job: processes join and leave, and it continues while there are enough of them.

Processes are numbered in the order of starts. A process has a rank as soon as the store has put it
into a generation. A process that fails is replaced by a new one in the same slot, after a delay
(`slots`), until a process has finished: then no more are started, and the job ends with the last
one. Success is an exit code of 0 that the process has announced to the store.

Everything but `Events.put` happens in the thread that runs the job.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hororing._job.rendezvous.elastic_store import CONNECTION_ENDED, ElasticStore
from hororing._job.rendezvous.generations import Apart, Done, Ended, Event, Joined, Lost, World
from hororing.hororun.flags.elastic import Elastic
from hororing.hororun.flags.host_lists import Host
from hororing.hororun.host.hosts import ASK_S, LOST, LocalHost
from hororing.hororun.host.local import CannotStartError, Program
from hororing.hororun.host.output import Output
from hororing.hororun.job import history
from hororing.hororun.job.discovery import Finder, Found
from hororing.hororun.job.elastic_events import Events
from hororing.hororun.job.elastic_processes import ElasticProcess, Processes
from hororing.hororun.job.ending import Grace, conclude_asked, end_report, way_out
from hororing.hororun.job.job import Job, JobHost, MakeHost
from hororing.hororun.job.news import News
from hororing.hororun.job.slots import Slot, Slots, pause

_NOT_STARTED = 127
_TOLD_S = 1.0
_LONGEST_WAIT_S = 3600.0  # epoll takes no longer ones than some weeks
_SILENT = "{} (stopped, or its host overloaded): hororun has ended it (--peer-timeout-s)"
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)  # no fault of the process


class ElasticJob(Job):
    """Processes come and go; as those of a `Sink`, their ranks are their numbers.

    Parameters
    ----------
    what : see there.
    output : whose `ranks` follow the generations.
    make_program : returns the program of the process with a number, in a slot.
    make_store : makes a store, not started yet, from the number of processes that it first waits
        for, the known hosts, and a function that it calls with events.
    make_host, grace, start_timeout_s : see `Job`.
    make_discovery : makes a `Finder` that calls one of two functions from time to time: with hosts,
        or with an error text. None: the hosts of `what` stay.
    membership : a file that gets a line of JSON for each generation. None: no file.

    Attributes
    ----------
    why : the job has failed; "": it has not.
    """

    def __init__(
        self,
        what: Elastic,
        output: Output,
        *,
        make_program: Callable[[int, Slot], Program],
        make_store: Callable[[Elastic, Sequence[Host], Callable[[Event], None]], ElasticStore],
        make_host: MakeHost,
        make_discovery: Callable[[ElasticJob, Found, Callable[[str], None]], Finder] | None = None,
        grace: Grace,
        start_timeout_s: float,
        membership: Path | None = None,
    ) -> None:
        super().__init__(output, make_host, grace, start_timeout_s)
        self._what, self._membership = what, membership
        self._make_program, self._make_store = make_program, make_store
        self._make_discovery = make_discovery
        self._events = Events(self.selector)
        self._slots = Slots(what.max_np, what.cooldown)
        self._known: Sequence[Host] | None = None
        self._retired: set[str] = set()  # names of hosts that members may not come from
        self._dead_hosts: list[JobHost] = []  # to be closed
        self._processes = Processes()
        self._several = what.script is not None or len(what.hosts) > 1
        self._news = News(output, self._several)
        self._store: ElasticStore | None = None  # once there are enough slots
        self._patience_s = what.elastic_timeout_s or math.inf
        self._few_since: float | None = None
        self._expected = 0
        self._finished = False  # a process has finished: no more are started
        self.why = ""  # it has failed
        self._discovery: Finder | None = None

    def exited(self, rank: int, code: int) -> None:
        """See `Sink.exited`."""
        process = self._processes.started[rank]
        if process.code is not None:
            return
        self._take_events()  # its earlier events
        until = time.monotonic() + _TOLD_S
        while code == 0 and process.is_member() and (left_s := until - time.monotonic()) > 0:
            self._take_events(left_s)  # the store is about to report how it has left
        process.code = code
        self._output.ended(rank, failed=code != 0)
        if process.status == 0 and self._store is not None:
            self._store.note_end(process.uid, code)
        process.slot.busy = False
        for gone in process.gone:
            gone.set()
        process.host.of.reap(rank)
        if self._ending.begun or process.leaves:
            return
        if code == 0 and not self._processes.generation:
            process.slot.busy = True  # it has done its work
            self._processes.no_ranks.append(process)
        elif code == 0 and process.generation and process.status == 0:
            self._finish()
        else:
            self._failed(process)

    def _failed(self, process: ElasticProcess) -> None:
        self._processes.failed.append(process)
        if self._finished:
            self.why = self.why or "a process has failed after another one had finished"
        else:
            took_part = process.generation > 0 and not process.refused
            rest_s = self._slots.failed(
                process.slot,
                time.monotonic(),
                early=not took_part and process.code not in _FROM_OUTSIDE,
                lived_s=time.monotonic() - process.began if took_part else 0.0,
            )
            process.then = pause(process.slot, rest_s)
        self._news.say_end(process)

    def _finish(self) -> None:
        """Start no more processes; end those that have not taken part yet."""
        self._finished = True
        for process in self._processes.live():
            if not process.generation:
                self._end(process)

    def _end(self, process: ElasticProcess, number: int = signal.SIGTERM) -> None:
        process.leaves = True
        process.host.of.signal(number, process.number)

    def _find_hosts(self) -> None:
        if self._make_discovery is None:
            self._found(list(self._what.hosts))
        else:
            self._discovery = self._make_discovery(self, self._found, self._not_found)

    def _is_over(self) -> bool:
        return (self._ending.begun or self._finished) and not self._processes.live()

    def _left(self) -> list[str]:
        return [each.name(self._several) for each in self._processes.live()]

    def _close(self) -> None:
        if self.asked is None:
            self._news.tell()
        if self._discovery is not None:
            self._discovery.close()
        super()._close()
        for host in self._dead_hosts:
            host.of.close()
        if self._store is not None:
            self._store.stop()
        self._events.close()

    def _left_s(self) -> float:
        """Time until the next action that no event triggers."""
        now = time.monotonic()
        used, starts = self._processes.used(), not (self._ending.begun or self._finished)
        times = [
            self._slots.next_at(now, used) if starts and self._store is not None else None,
            self._few_since + self._patience_s if starts and self._few_since else None,
            self._news.tell_at,
            *(host.ready_by for host in self._hosts.values() if not host.of.ready),
            *(
                each.lost_at + self._grace_s
                for each in self._processes.live()
                if each.lost_at is not None
            ),
            *(max(each + self._grace_s, now + ASK_S) for each in self._processes.left()),
        ]
        finds = self._discovery.left_s() if self._discovery is not None and starts else None
        lefts = [max(each - now, 0.0) for each in times if each is not None]
        lefts += [x for x in (self._ending.left_s(), self._output.due_s(), finds) if x is not None]
        return min([*lefts, _LONGEST_WAIT_S])

    def _start_due(self) -> None:
        if self._ending.begun or self._finished:
            return
        if self._store is None:
            if self._slots.usable() < self._what.np:
                return
            # Each change takes time, so the first generation has a process for every slot.
            at_first = replace(self._what, np=self._slots.usable())
            self._store = self._make_store(at_first, self._known or (), self._events.put)
            self._store.start_thread()
        for slot in self._slots.due(time.monotonic(), self._processes.used()):
            if slot.host not in self._hosts:
                self._reach_again(slot.host)
            host = self._hosts.get(slot.host)
            if host is not None and host.of.ready and not host.leaves:
                self._start(slot, host)
        expected = max(
            self._slots.usable() - sum(bool(each.uid) for each in self._processes.live()), 0
        )
        if expected != self._expected:
            self._expected = expected
            self._store.expect(expected)

    def _reach_again(self, name: str) -> None:
        try:
            host = self._reach(name)
        except CannotStartError as error:  # the command that reaches others
            self._fail(str(error))
            return
        if name in self._retired and self._store is not None:
            self._retired.remove(name)
            self._store.hosts_updated(added=[host.of.hostname])

    def _start(self, slot: Slot, host: JobHost) -> None:
        process = ElasticProcess(len(self.processes), slot, host, time.monotonic())
        if self._processes.generation or self._processes.failed:
            self._news.say_after(self._processes.start_text(process, self._several))
        slot.busy = True
        self._processes.started.append(process)
        try:
            host.of.start([self._make_program(process.number, slot)])
        except CannotStartError as error:
            self._output.log(str(error))
            self.exited(process.number, _NOT_STARTED)

    def _found(self, hosts: list[Host]) -> None:
        first = self._known is None
        counts = {host.name: host.slots for host in self._known or ()}
        self._known = hosts
        came, gone = self._slots.update(hosts)
        for name in gone:
            if not first:
                self._news.say(f"host {name} was removed")
            self._retire(name)
        if came and not first:
            self._news.say(f"host {', '.join(came)} was added")
        self._news.say_changes(counts, hosts)
        for process in self._processes.live():
            if not process.leaves and process.slot not in self._slots.of(process.slot.host):
                why = f"the slot of process {process.number} was removed"
                self._dismiss([process], process.uid, why)

    def _retire(self, name: str) -> None:
        host = self._hosts.get(name)
        if host is not None:
            host.leaves = True
            self._retired.add(name)
            here = [each for each in self._processes.live() if each.host is host]
            self._dismiss(here, host.of.hostname, f"host {name} was removed")

    def _dismiss(self, processes: Sequence[ElasticProcess], name: str, why: str) -> None:
        """Let members leave at their next commit, and others at once. `name`: a host, or a uid."""
        for process in processes:
            process.leaves = True
            if not process.generation:
                self._end(process)
        assert self._store is not None
        self._news.add(why)
        self._store.retire(name)
        self._store.hosts_updated(removed=[name])

    def _not_found(self, text: str) -> None:
        if self._known is None:
            raise CannotStartError(text)
        self._news.say(text)

    def _host_ended(self, name: str, host: JobHost, text: str) -> None:
        if self._hosts.get(name) is not host:
            return
        del self._hosts[name]
        self._dead_hosts.append(host)
        if not (self._ending.begun or self._finished):
            self._news.say(text)
            for slot in self._slots.of(name):
                if not slot.busy:
                    self._slots.failed(slot, time.monotonic(), early=True)

    def _look_at_hosts(self) -> None:
        if self._discovery is not None and not (self._ending.begun or self._finished):
            self._discovery.go_on()
        for name, host in list(self._hosts.items()):
            if not host.of.ready and time.monotonic() >= host.ready_by:
                self._host_ended(name, host, self._unanswered([name]))
            elif host.leaves and not any(each.host is host for each in self._processes.live()):
                del self._hosts[name]
                self._dead_hosts.append(host)
        for host in self._dead_hosts:
            host.of.close()
        self._dead_hosts.clear()

    def _take_events(self, wait_s: float = 0.0) -> None:
        for event, gone in self._events.take(wait_s):
            if isinstance(event, World):
                self._form(event)
            elif isinstance(event, Ended):
                self._fail(event.reason)
            elif isinstance(event, Apart):
                self._news.add(event.why, stops=True)
            elif isinstance(event, (Joined, Lost, Done)):
                self._about(event, gone)

    def _about(self, event: Joined | Lost | Done, gone: threading.Event) -> None:
        process = self._processes.of(event.uid)
        if process is None:  # a process that we did not start, but that knows the secret
            gone.set()
            return
        if isinstance(event, Joined):
            process.uid, process.lost_at, process.left_at = event.uid, None, None
            if self._processes.generation:
                self._news.add(f"process {process.number} has arrived")
        elif isinstance(event, Lost):
            self._news.add(process, stops=not event.refused)
            process.lost_at = process.left_at = time.monotonic()
            process.gone.append(gone)
            process.refused = event.refused
            if event.refused:
                process.end = f"was not admitted: {event.why}"
            elif process.code is None and event.why != CONNECTION_ENDED:
                process.end = _SILENT.format(event.why)
                process.host.of.signal(signal.SIGKILL, process.number)
            if process.code is not None or not isinstance(process.host.of, LocalHost):
                gone.set()
        else:
            process.status, process.left_at = event.status, time.monotonic()
            self._news.add(process, stops=True, quiet=event.status == 0)

    def _form(self, world: World) -> None:
        ranks = self._processes.form(world)
        for process in self._processes.live():
            if process.number not in ranks and process.leaves:
                self._end(process)
        self._output.ranks = ranks
        cause = self._news.form(world)
        if self._membership is not None:
            history.record(self._membership, world, cause, self._output.log)
        if 0 < self._what.reset_limit < world.generation - 1:
            self._fail(f"more than {self._what.reset_limit} resets (--reset-limit)")

    def _judge(self) -> None:
        self._take_events()
        self._news.tell_due(self._ending.begun)
        self._look_at_hosts()
        for process in self._processes.live():
            if process.lost_at is not None and time.monotonic() >= process.lost_at + self._grace_s:
                process.lost_at = None
                process.end = f"had lost its connection for {self._grace_s:g} s, and was ended"
                self._end(process, signal.SIGKILL)
        for process in self._processes.frozen(self._grace_s):
            self._abandon(process)
        if not (self._ending.begun or self._finished):
            self._judge_slots()
            self._judge_processes()

    def _judge_processes(self) -> None:
        if why := self._processes.why_over(usable := self._slots.usable(), self._several):
            self._fail(why)
        elif self._processes.all_ended_before_init(usable):
            self._finish()

    def _judge_slots(self) -> None:
        usable = self._slots.usable()
        wanted = self._what.np if self._store is None else self._what.min_np
        if usable >= wanted:
            self._few_since = None
            return
        text = f"there are {usable} usable slots, of at least {wanted} that are needed"
        if self._discovery is None:
            self._fail(text)
        elif self._few_since is None:
            self._few_since = time.monotonic()
        elif time.monotonic() >= self._few_since + self._patience_s:
            self._fail(f"{text}, for {self._patience_s:g} s (--elastic-timeout)")

    def _abandon(self, process: ElasticProcess) -> None:
        """Count a process as ended whose host's agent does not report that."""
        if not process.host.leaves:
            process.host.leaves = True  # nothing starts there any more
            self._news.say(f"host {process.slot.host} is lost: its agent does not answer")
        process.end = "was on a host whose agent does not answer"
        self.exited(process.number, 0 if process.status == 0 else LOST)

    def _fail(self, why: str) -> None:
        if not self.why:
            self.why = why
        if not self._ending.begun:
            self._ending.stop(signal.SIGTERM)

    @property
    def processes(self) -> Sequence[ElasticProcess]:
        """All that were started, by number; those that have failed are among them."""
        return self._processes.started

    @property
    def first_failed(self) -> ElasticProcess | None:
        """The process that best explains why the job has failed."""
        return self._processes.blamed()

    def conclude(self) -> int:
        """Print how it has ended, and return the exit code of hororun."""
        if self._processes.failed and self.asked is None:
            self._output.log(self._processes.failures(self._several))
        if self._ending.asked is not None:
            codes = [each.code for each in self.processes] or [1]
            return conclude_asked(self._ending.asked, codes, self._output)
        if not self.why:
            return 0
        self._output.log(f"the job has failed: {self.why}")
        if self.first_failed is None:
            return 1
        out = way_out(self._output.tail(self.first_failed.number))
        for line in [*self.end_report(self.first_failed, again=False), *out]:
            self._output.log(line)
        code = self.first_failed.code or 1
        return code if code > 0 else 128 - code

    def end_report(self, process: ElasticProcess, *, again: bool = True) -> list[str]:
        """Lines for the user: how it has ended. `again`: with lines that were just shown."""
        how = f"{process.name(self._several)} {process.how()}"
        tail = self._output.tail(process.number)
        if tail and not again and not self._output.repeats(process.number):
            return [how]
        return end_report(how, 0 if process.end else process.code or 0, tail)
