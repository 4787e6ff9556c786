"""``python -m hororing store``: the store of an elastic job whose processes hororun does not start.

Kubernetes, mpirun or a shell start them, and replace those that fail: see docs/elastic.md.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import re
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from hororing import config
from hororing._job import bootstrap, limits
from hororing._job.endpoints import KUBERNETES_PORT
from hororing._job.rendezvous import protocol
from hororing._job.rendezvous.elastic_store import (
    Apart,
    Done,
    ElasticStore,
    Ended,
    Event,
    Joined,
    Lost,
    World,
)
from hororing.hororun.job import history

_DEFAULT = f"127.0.0.1:{KUBERNETES_PORT}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("-np", "--num-proc", type=int, required=True, metavar="N",
        help="how many processes the job waits for at its start")  # fmt: skip
    add("--min-np", type=int, metavar="N", help="minimum number of processes (-np)")
    add("--max-np", type=int, metavar="N", help="maximum number of processes (-np)")
    add("--listen", default=_DEFAULT, metavar="[HOST:]PORT",
        help=f"where processes find it; a port alone: at all addresses ({_DEFAULT})")  # fmt: skip
    add("--membership", type=Path, metavar="FILE",
        help="gets a line of JSON for each generation")  # fmt: skip
    add("--linger", type=float, default=0.0, metavar="S",
        help="serve this long after the end, so that late processes exit cleanly (0)")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Serve until the job ends, or a signal arrives.

    Returns
    -------
    0: the job's processes have finished; 1: it cannot continue; 2: flags; 130: Ctrl-C; 143:
    SIGTERM.
    """
    limits.raise_files()
    try:
        store, job = _made(arguments)
        store.listen()
    except (ValueError, OSError) as error:
        print(f"store: {error}", file=sys.stderr)
        return 2
    before = {each: signal.signal(each, _interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        store.start_thread()
        job.log(f"waits for {arguments.num_proc} processes, port {store.port}")
        code = job.follow()
        with contextlib.suppress(_Interrupted):
            time.sleep(arguments.linger if code == 0 else 0)
        return code
    except _Interrupted as interrupt:
        job.log(f"ended by {interrupt.signal.name}")
        return 128 + interrupt.signal
    finally:
        store.stop()
        for each, handler in before.items():
            signal.signal(each, handler)


class _Job:
    """Handles the events of the store."""

    def __init__(self, membership: Path | None, reset_limit: int) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._membership, self._reset_limit = membership, reset_limit
        self._members: dict[str, bool] = {}  # by uid: whether it has taken part
        self._causes: list[str] = []  # of the next generation
        self._generation = 0
        self._finished = False

    def log(self, text: str) -> None:
        print(f"store: {text}", file=sys.stderr, flush=True)

    def follow(self) -> int:
        """Wait until the job is over; return the exit code."""
        why = None
        while why is None:
            why = self._note(self.events.get())
        self.log(why or "the job has finished")
        return 1 if why else 0

    def _note(self, event: Event) -> str | None:
        """Return None if the job continues, "" if it has finished, or why it has failed."""
        if isinstance(event, Joined):
            self._members[event.uid] = False
            self._causes += [f"{_describe(event)} has arrived"] if self._generation else []
        elif isinstance(event, World):
            return self._form(event)
        elif isinstance(event, Ended):
            return event.reason
        elif isinstance(event, Apart):
            self._causes.append(event.why)
            self.log(event.why)
        elif isinstance(event, (Lost, Done)):
            return self._left(event, took_part=self._members.pop(event.uid, False))
        return None

    def _left(self, event: Lost | Done, took_part: bool) -> str | None:
        left = any(self._members.values())
        if isinstance(event, Lost):
            self._causes.append(f"lost {_describe(event)}")
            how = "is not admitted" if event.refused else "is lost"
            self.log(f"{_describe(event)} {how}: {event.why}")
            if took_part and self._finished:
                return "a process has failed after another one had finished"
            return (
                "no process is left that has the state of the training"
                if took_part and not left
                else None
            )
        self._finished |= took_part and event.status == 0
        if took_part and not left:
            return "" if self._finished else "the last process has ended without finishing"
        return None

    def _form(self, world: World) -> str | None:
        self._generation = world.generation
        self._members.update({each.uid: True for each in world.members})
        cause = "; ".join(self._causes) or "start"
        self._causes.clear()
        self.log(f"generation {world.generation} has {len(world.members)} ranks: {cause}")
        if self._membership is not None:
            history.record(self._membership, world, cause, self.log)
        if self._reset_limit and world.generation - 1 > self._reset_limit:
            return f"more than {self._reset_limit} resets (HORORING_RESET_LIMIT)"
        return None


def _made(arguments: argparse.Namespace) -> tuple[ElasticStore, _Job]:
    np = arguments.num_proc
    min_np, max_np = (np if each is None else each for each in (arguments.min_np, arguments.max_np))
    if not 1 <= min_np <= np <= max_np:
        raise ValueError(f"--min-np {min_np}, -np {np}, --max-np {max_np}: they must ascend from 1")
    if not 0 <= arguments.linger <= 1e9:
        raise ValueError(f"--linger {arguments.linger:g} is not a number of seconds")
    if re.fullmatch(r"\d{1,5}", arguments.listen):
        host, port = "", int(arguments.listen)
        if port >= 2**16:
            raise ValueError(f"--listen {port} is not a port")
    else:
        host, port = protocol.parse_address(arguments.listen)
    if arguments.membership is not None:
        arguments.membership.open("ab").close()  # an error now, not in the middle of the job
    settings = config.load()
    secret, name, insecure = bootstrap.of_store(host)
    job = _Job(arguments.membership, settings["RESET_LIMIT"])
    store = ElasticStore(
        job=name, secret=secret, host=host, port=port, insecure=insecure,
        np=np, min_np=min_np, max_np=max_np,
        elastic_timeout_s=settings["ELASTIC_TIMEOUT_S"],
        peer_timeout_s=settings["PEER_TIMEOUT_S"],
        on_event=job.events.put,
    )  # fmt: skip
    return store, job


def _describe(event: Joined | Lost) -> str:
    return f"process {event.pid} on host {event.host}"


class _Interrupted(BaseException):
    """A signal requests the end of the store."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _Interrupted(number)
