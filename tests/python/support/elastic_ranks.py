"""Elastic jobs for tests: a store in this process, and real processes as ranks, which sum.

Each rank prints lines "event number number ...", which the store's process reads.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from hororing._job.rendezvous.elastic_store import ElasticStore
from hororing._job.rendezvous.generations import Event, Lost, World

DEADLINE_S = 200.0  # on a busy machine, four processes take a minute to import TensorFlow
SECRET = "of these tests, 32 characters ..."

# A step is a sum of ones. The ranks agree to stop once the file `stop` exists.
TRAIN = """
import os, sys, time
import numpy as np
import hororing.numpy as hvd
from hororing._engine import membership
from hororing.errors import HororingInternalError

stop, step, going = sys.argv[1], 0, True
while going:
    hvd.init()
    print("world", membership.generation(), hvd.rank(), hvd.size(), flush=True)
    try:
        step = int(hvd.allreduce(np.array([step]), op=hvd.Max, name="step")[0])
        while going:
            told = np.array([1, os.path.exists(stop), membership.updates()[1]])
            ones, stopped, updated = hvd.allreduce(told, op=hvd.Sum, name="told")
            assert ones == hvd.size(), (ones, hvd.size())
            step += 1
            membership.set_progress(step)
            going = not stopped
            if step % 50 == 1:
                print("step", step, flush=True)
            if updated:
                hvd.shutdown()
                break
    except HororingInternalError as error:
        print("error", type(error).__name__, error.__dict__.get("rank", ""), flush=True)
        hvd.shutdown()
print("end", step, hvd.allreduce(np.array([float(step)]), op=hvd.Max)[0], flush=True)
"""


class ElasticJob:
    """A store, and processes. As a context manager it ends all of them.

    Attributes
    ----------
    events : the events of the store, in order.
    ranks : the processes, in the order of their start.
    lines : the output of each process.
    """

    def __init__(self, np: int, min_np: int = 1, max_np: int | None = None, **how: Any) -> None:
        self.events: list[Event] = []
        self.ranks: list[subprocess.Popen[str]] = []
        self.lines: list[list[str]] = []
        self._changed = threading.Condition()
        # Long enough that no process is declared lost on a busy machine.
        how = {"peer_timeout_s": DEADLINE_S, **how}
        self.store = ElasticStore(
            job="elastic", secret=SECRET.encode(), np=np, min_np=min_np, max_np=max_np or np + 1,
            on_event=self._note, **how,
        )  # fmt: skip

    def __enter__(self) -> ElasticJob:
        self.store.start_thread()
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        self.store.stop()

    def start(self, *arguments: str, script: str = TRAIN, **variables: str) -> int:
        """Start a process; return its index in `ranks`."""
        env = {
            **os.environ, "HORORING_ELASTIC": "1", "HORORING_JOB": "elastic",
            "HORORING_RENDEZVOUS": f"127.0.0.1:{self.store.port}", "HORORING_SECRET_KEY": SECRET,
            **variables,
        }  # fmt: skip
        rank = subprocess.Popen(
            [sys.executable, "-c", script, *arguments], env=env, stdout=subprocess.PIPE, text=True,
            # Shells make background processes ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        self.ranks.append(rank)
        self.lines.append([])
        threading.Thread(target=self._read, args=(rank, self.lines[-1]), daemon=True).start()
        return len(self.ranks) - 1

    def begin(self, count: int, *arguments: str, script: str = TRAIN, **variables: str) -> None:
        """Start the first processes, and wait until all of them work."""
        for _ in range(count):
            self.start(*arguments, script=script, **variables)
        self.wait(lambda: all(self.started(each, 1) for each in range(count)))

    def kill(self, rank: int) -> list[int]:
        """Kill a rank of the last generation; return the others once they work without it."""
        world, killed = self.worlds()[-1], self.process_of(rank)
        self.ranks[killed].kill()
        pids = [each.pid for each in world.members]
        rest = [n for n, each in enumerate(self.ranks) if each.pid in pids and n != killed]
        self.wait(lambda: all(self.started(each, world.generation + 1) for each in rest))
        return rest

    def wait(self, true: Callable[[], Any]) -> Any:
        """Wait until `true` returns something true, and return that."""
        end = time.monotonic() + DEADLINE_S
        with self._changed:
            while not (found := true()):
                left_s = end - time.monotonic()
                assert left_s > 0, (self.events, self.lines)
                self._changed.wait(min(left_s, 0.5))
        return found

    def worlds(self) -> list[World]:
        """Return the generations so far."""
        return [event for event in self.events if isinstance(event, World)]

    def lost(self) -> list[Lost]:
        """Return the lost processes so far."""
        return [event for event in self.events if isinstance(event, Lost)]

    def started(self, process: int, generation: int) -> bool:
        """Return whether the process has begun to work in this generation."""
        return any(line.split()[:2] == ["world", str(generation)] for line in self.lines[process])

    def process_of(self, rank: int) -> int:
        """Return the index in `ranks` of this rank of the last generation."""
        pid = self.worlds()[-1].members[rank].pid
        return [each.pid for each in self.ranks].index(pid)

    def ends(self, *processes: int) -> list[str]:
        """Wait for the successful end of these processes; return their last lines."""
        for each in processes:
            assert self.ranks[each].wait(DEADLINE_S) == 0, self.lines
        self.wait(lambda: all(self.lines[each][-1].startswith("end") for each in processes))
        return [self.lines[each][-1] for each in processes]

    def _note(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def _read(self, rank: subprocess.Popen[str], lines: list[str]) -> None:
        assert rank.stdout is not None
        for line in rank.stdout:
            with self._changed:
                lines.append(line.strip())
                self._changed.notify_all()
