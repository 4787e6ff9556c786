"""Elastic jobs whose processes are Ray actors: lost actors are replaced, the others continue.

hororun's `ElasticJob` runs such a job. It treats the cluster as one host, on which Ray places each
process.
"""

from __future__ import annotations

import functools
import pickle
import queue
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray

from hororing import config
from hororing._engine import shutdown
from hororing._job.rendezvous import protocol
from hororing._job.rendezvous.elastic_store import ElasticStore
from hororing.errors import RunError
from hororing.hororun import function
from hororing.hororun.call import RAISED, RETURNED, packed, pickled, raised
from hororing.hororun.elastic_call import EndedElastic
from hororing.hororun.flags.elastic import Elastic
from hororing.hororun.flags.host_lists import Host
from hororing.hororun.host.local import RESULT, STDERR, Program
from hororing.hororun.host.output import Output
from hororing.hororun.job.discovery import Found
from hororing.hororun.job.elastic import ElasticJob
from hororing.hororun.job.ending import OTHERS, Grace
from hororing.ray import ranks

_POLL_S = 1.0  # time between two checks for free resources
_GRACE_S = 5.0
_DIED = 255  # its exit code is unknown


def chosen(
    num_workers: int | None,
    min_workers: int | None,
    max_workers: int | None,
    reset_limit: int | None,
    cooldown_range: tuple[float, float] | None,
    elastic_timeout: float,
) -> Elastic:
    """The elastic settings of `RayExecutor`. ValueError."""
    np = num_workers or min_workers or 1
    minimum, maximum = min_workers or np, max_workers or sys.maxsize
    if not minimum <= np <= maximum:
        raise ValueError(
            f"RayExecutor: min_workers={minimum}, num_workers={np}, "
            f"max_workers={maximum}: they must ascend"
        )
    if cooldown_range is not None and not 0 < cooldown_range[0] <= cooldown_range[1]:
        raise ValueError(f"RayExecutor: cooldown_range={cooldown_range} must ascend from above 0")
    return Elastic(
        np, minimum, maximum, cooldown=cooldown_range, reset_limit=reset_limit or 0,
        elastic_timeout_s=elastic_timeout,
    )  # fmt: skip


def run(
    elastic: Elastic,
    resources: Mapping[str, float],
    variables: Mapping[str, str],
    make: Callable[[], Any] | None,
    fn: Callable[[Any], Any],
) -> list[Any]:
    """Call `fn` on all ranks, which join and leave, and return the results of those that finish.

    Parameters
    ----------
    resources : dict of str to float
        Of each actor, by Ray's names.
    variables : dict of str to str
        For the ranks, in addition to those of the rendezvous.
    make : callable or None
        Each rank calls it to make the argument of `fn`.
    """
    secret, name = protocol.new_secret(), secrets.token_hex(8)
    settings = config.load(variables)
    actors = _Actors(elastic, resources, secret, ray.put((make, fn)))
    environment = {**variables, "HORORING_ELASTIC": "1", "HORORING_JOB": name}

    def make_store(at_first: Elastic, hosts: Sequence[Host], on_event: Any) -> ElasticStore:
        store = ElasticStore(
            job=name, secret=secret, host="", on_event=on_event,
            np=at_first.np, min_np=at_first.min_np, max_np=at_first.max_np,
            elastic_timeout_s=elastic.elastic_timeout_s, peer_timeout_s=settings["PEER_TIMEOUT_S"],
            ends_are_noted=True,
        )  # fmt: skip
        store.listen()
        here = ray.util.get_node_ip_address()
        environment["HORORING_RENDEZVOUS"] = protocol.show_address(here, store.port)
        return store

    job = ElasticJob(
        elastic, Output({STDERR: function.Stream(sys.stderr)}, 1, tag=False, elastic=True),
        make_program=lambda number, slot: Program(
            number, (), {**environment, "HORORING_PROCESS": str(number)}, ""
        ),
        make_store=make_store, make_host=actors.of, make_discovery=actors.found_by,
        grace=Grace(_GRACE_S, _GRACE_S), start_timeout_s=0.0,
    )  # fmt: skip
    job.run()
    function.pass_signal_on(job.asked)
    if job.why and not job.processes:
        raise RunError(
            f"run: {job.why}: each actor needs {dict(resources)}, and the cluster has "
            f"{ray.cluster_resources()}, of which are free {ray.available_resources()}"
        )
    ended = EndedElastic(job)
    return function.results(ended, len(ended.results))


class _Actors:
    """The actors of a job: its only host, which also counts how many fit into the cluster."""

    def __init__(
        self, elastic: Elastic, resources: Mapping[str, float], secret: bytes, call: Any
    ) -> None:
        self.name = self.hostname = "Ray"
        self.ready = True
        self._elastic, self._resources = elastic, resources
        self._secret, self._call = secret, call
        self._job: ElasticJob | None = None
        self._found: Found = lambda hosts: None
        self._room, self._next_look = 0, 0.0
        self._handles: dict[int, Any] = {}  # by process number
        self._ends: queue.SimpleQueue[tuple[int, Future[Any]]] = queue.SimpleQueue()
        # Sockets, because Ray may report ends after everything is closed.
        self._wakes, self._wake = socket.socketpair()

    def of(self, job: ElasticJob, name: str, ended: Callable[[str], None]) -> _Actors:
        """Like `make_host` of `ElasticJob`."""
        return self

    def found_by(self, job: ElasticJob, found: Found, failed: Callable[[str], None]) -> _Actors:
        """Like `make_discovery` of `ElasticJob`."""
        self._job, self._found = job, found
        job.selector.register(self._wakes, selectors.EVENT_READ, self._take)
        return self

    # -- discovery: see hororun.discovery --------------------------------------------------------

    def left_s(self) -> float:
        """Time until the next check."""
        return max(self._next_look - time.monotonic(), 0.0)

    def go_on(self) -> None:
        """Check for free resources from time to time. A lost actor keeps its place."""
        if self.left_s() > 0:
            return
        self._next_look = time.monotonic() + _POLL_S
        placed = self._job is None or all(
            each.uid for each in self._job.processes if each.code is None
        )
        if placed:  # otherwise Ray does not know yet what they use
            free = ray.available_resources()
            needs = [(name, need) for name, need in self._resources.items() if need]
            fits = [int(free.get(name, 0) // need) for name, need in needs]
            fit = min(fits, default=self._elastic.np)
            self._room = max(self._room, min(len(self._handles) + fit, self._elastic.max_np))
        if self._room:
            self._found([Host(self.name, self._room)])

    # -- a host: see `ProcessHost` ---------------------------------------------------------------

    def start(self, programs: Sequence[Program]) -> None:
        """Start actors."""
        cpus, gpus = self._resources.get("CPU", 0), self._resources.get("GPU", 0)
        for program in programs:
            actor = ray.remote(_Process).options(num_cpus=cpus, num_gpus=gpus).remote()
            self._handles[program.rank] = actor
            answer = actor.train.remote(dict(program.environment), self._secret, self._call)
            answer.future().add_done_callback(functools.partial(self._ended, program.rank))

    def signal(self, number: int, rank: int | None = None) -> None:
        """End them: Ray has no other signal."""
        for each in [*self._handles] if rank is None else [rank]:
            if number not in OTHERS and each in self._handles:
                ray.kill(self._handles[each])

    def stopped(self) -> set[int]:
        """Like `ProcessHost.stopped`: unknown."""
        return set()

    def silent_s(self) -> float:
        """Return 0: Ray reports the end of a node."""
        return 0.0

    def reap(self, rank: int) -> None:
        """End an actor that has answered."""
        self.signal(signal.SIGKILL, rank)
        self._handles.pop(rank, None)

    def close(self) -> None:
        """End all actors."""
        self.signal(signal.SIGKILL)
        self._handles.clear()
        if self._job is not None:
            with suppress(KeyError, ValueError):
                self._job.selector.unregister(self._wakes)
        self._wakes.close()
        self._wake.close()

    def _ended(self, number: int, answer: Future[Any]) -> None:
        """Runs in a thread of Ray."""
        self._ends.put((number, answer))
        with suppress(OSError):
            self._wake.send(b"1")

    def _take(self) -> None:
        assert self._job is not None
        self._wakes.recv(1)
        number, answer = self._ends.get()
        try:
            code, body = answer.result()
        except Exception as error:
            code, body = _DIED, b""
            why = str(error).strip().splitlines()[-1].partition(" Some common causes")[0]
            self._job.processes[number].end = f"has died ({why})"
        self._job.output(number, RESULT, body)
        self._job.exited(number, code)


class _Process:
    """The actor of a process."""

    def train(
        self,
        variables: Mapping[str, str],
        secret: bytes,
        call: tuple[Callable[[], Any] | None, Callable[[Any], Any]],
    ) -> tuple[int, bytes]:
        """Run it as a process of the job. Returns an exit code, and the answer for `call.read`."""
        ranks.become(variables, secret)
        try:
            make, fn = call
            code, answer = 0, packed(RETURNED, pickled(fn(make() if make else None)))
            shutdown.leave()
        except SystemExit as error:  # of `init` if the job no longer needs it, or of the script
            code, answer = error.code if isinstance(error.code, int) else bool(error.code), b""
            shutdown.leave(error if code else None)
        except BaseException as error:
            code, answer = 1, packed(RAISED, pickle.dumps(raised(error)))
            shutdown.leave(error)
        return int(code), answer
