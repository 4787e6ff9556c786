"""The part of `hororing.spark.run` in a task: it starts the process of a rank."""

from __future__ import annotations

import json
import os
import pickle
import selectors
import socket
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from io import FileIO, RawIOBase

from pyspark import BarrierTaskContext

from hororing._job.rendezvous import interfaces, protocol
from hororing.config import environment
from hororing.hororun.call import PROGRAM
from hororing.hororun.host.agent import free_port
from hororing.hororun.host.local import (
    RESULT,
    STDERR,
    STDOUT,
    LocalRanks,
    Program,
    memory_file,
    step,
)
from hororing.hororun.host.output import Output
from hororing.hororun.job import plan
from hororing.hororun.job.plan import Rendezvous


@dataclass(frozen=True)
class TaskSettings:
    """The settings of the tasks."""

    job: str
    store: str  # its address
    secret: bytes = field(repr=False)
    variables: dict[str, str]
    executable: str | None
    payload: bytes = field(repr=False)


@dataclass(frozen=True)
class Outcome:
    """The end of a rank."""

    rank: int
    host: str
    code: int  # exit code, or minus the signal
    answer: bytearray
    last_lines: list[str]  # of its standard error


def run_rank(task: TaskSettings, _: Iterable[int]) -> Iterator[Outcome]:
    """Run one task of a barrier stage: yield how its rank has ended. Blocks until then."""
    context = BarrierTaskContext.get()
    driver, _port = protocol.parse_address(task.store)
    mine = [socket.gethostname(), interfaces.towards(driver), free_port()]
    everybody = [json.loads(text) for text in context.allGather(json.dumps(mine))]
    order = plan.neighbours([each[0] for each in everybody])
    rank = order.index(context.partitionId())
    _, address, port = everybody[order[0]]
    rendezvous = Rendezvous(task.job, task.store, (address, port))
    place = plan.by_host([everybody[i][0] for i in order])[rank]
    env = {
        "PYTHONUNBUFFERED": "1",
        **environment.inherited(),
        **task.variables,
        **plan.environment(place, len(order), rendezvous),
    }
    call = pickle.loads(task.payload)
    # Spark puts modules where tasks find them; this host need not have the driver's folders.
    call = replace(call, path=[*dict.fromkeys([*sys.path, *call.path])])
    yield _Process(rank, len(order)).run(task, env, pickle.dumps(call))


class _Process:
    """The process of a rank. A `Sink`."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._code: int | None = None
        self._answer = bytearray()
        streams: dict[str, RawIOBase] = {
            STDOUT: FileIO(1, "wb", closefd=False),
            STDERR: FileIO(2, "wb", closefd=False),
        }
        self._output = Output(streams, size, tag=size > 1)

    def output(self, rank: int, stream: str, data: bytes) -> None:
        if stream == RESULT:
            self._answer += data
        else:
            self._output.write(rank, stream, data)

    def exited(self, rank: int, code: int) -> None:
        self._code = code

    def run(self, task: TaskSettings, environment: dict[str, str], payload: bytes) -> Outcome:
        """Start it, and wait until it has ended. If the task is killed, so is the process."""
        descriptors = memory_file("secret", task.secret), memory_file("payload", payload)
        environment["HORORING_SECRET_FD"] = str(descriptors[0])
        command = [task.executable or sys.executable, "-c", PROGRAM]
        with selectors.DefaultSelector() as selector:
            ranks = LocalRanks(selector, self)
            try:
                ranks.start(
                    Program(
                        self._rank,
                        command,
                        environment,
                        os.getcwd(),
                        stdin=descriptors[1],
                        answers=True,
                    ),
                    descriptors[0],
                )
                while self._code is None:
                    step(selector)
            finally:
                ranks.close()
                self._output.close()
                for each in descriptors:
                    os.close(each)
        lines = [f"    {line.decode('utf-8', 'replace')}" for line in self._output.tail(self._rank)]
        return Outcome(self._rank, socket.gethostname(), self._code, self._answer, lines)
