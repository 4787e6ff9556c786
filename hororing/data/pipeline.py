"""Pipeline: stages that work on batches ahead of training, each in a process of its own.

    item --> stage 1 --ring--> stage 2 --ring--> ... --ring--> this process     (times `lanes`)

A step takes as long as the slowest stage (or training itself), not as long as all of them. Between
two processes is a ring in shared memory (hororing/data/ring.py). With several lanes the k-th item
goes through lane k mod lanes, so that results come in the order of the items, always.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from hororing.data import ring
from hororing.data.worker import LEFT_ALONE, Failure, Setup

Stage = Callable[[Any], Any]

# How often a wait looks whether all processes are there, and lets Python handle signals.
_LOOK_S = 0.1
# How long processes have to end by themselves.
_END_S = 5.0


class StageError(RuntimeError):
    """A stage raised an exception, which is the cause of this one where it could be pickled."""


class WorkerLostError(RuntimeError):
    """A process of the pipeline has ended, or has not delivered anything in time."""


@dataclass
class _Lane:
    """What one chain of processes consists of."""

    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    output: ring.Consumer | None = None


class Pipeline:
    """Stages, each of them a process (or several), over a list of items per epoch::

        with Pipeline(read, decode, lanes=2) as pipeline:
            for epoch in range(epochs):
                shard.set_epoch(epoch)
                for batch in pipeline(np.array_split(shard.indices(), steps)):
                    train(batch)

    Processes start when it is made, take up to a second to do so, and serve all epochs. They are
    fresh interpreters, so it does not matter what this process has initialised, and the main script
    needs no ``if __name__ == "__main__"``; functions, lambdas and what they hold go to them by
    cloudpickle. They end with `close`, with the pipeline, or with this process, however it ends,
    and leave nothing behind.

    Parameters
    ----------
    *stages : functions of one argument. The first gets an item, each other one what the one before
        has returned; NumPy arrays among that are passed on without pickling, and lie in shared
        memory: a stage must copy what it keeps after it has returned.
    lanes : chains of processes that work on different items at the same time.
    slots : results that wait between two stages, a power of two.
    slot_bytes : of the largest result. Memory is taken as it is used: lanes * len(stages) * slots *
        slot_bytes at most.
    timeout_s : how long the consumer waits for one item.

    Raises
    ------
    ValueError, TypeError : for wrong arguments; for stages that cannot be pickled, that of pickle.
    """

    def __init__(
        self,
        *stages: Stage,
        lanes: int = 1,
        slots: int = 4,
        slot_bytes: int = 64 << 20,
        timeout_s: float = 600.0,
    ) -> None:
        if not stages or lanes < 1 or not timeout_s > 0:
            raise ValueError(
                f"Pipeline: {len(stages)} stages, lanes={lanes}, timeout_s={timeout_s}: must be at "
                "least 1, and positive"
            )
        for at, stage in enumerate(stages, 1):
            if not callable(stage):
                raise TypeError(f"Pipeline: stage {at} must be a function, not {stage!r:.80}")
        self._slots, self._slot_bytes, self._timeout_s = slots, slot_bytes, timeout_s
        self._epoch = 0
        self._lanes: list[_Lane] = []
        self._end = weakref.finalize(self, _end, self._lanes, os.getpid())
        pickled = [cloudpickle.dumps(stage) for stage in stages]
        names = [getattr(stage, "__name__", type(stage).__name__) for stage in stages]
        titles = [f"stage {at} '{name}'" for at, name in enumerate(names, 1)]
        try:
            for _ in range(lanes):
                self._start(list(zip(titles, pickled, strict=True)))
        except BaseException:
            self.close()
            raise
        self._titles = titles

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Arrays that were yielded stay valid."""
        self._end()

    def __call__(self, items: Iterable[Any], *, held: int = 0) -> Iterator[Any]:
        """Begin an epoch: yield what the last stage makes of each item, in order.

        What is left of an epoch before is dropped; its iterator raises RuntimeError.

        Parameters
        ----------
        items : anything that can be pickled; all are sent at once.
        held : 0 for results of their own; h > 0 (below `slots`) for arrays that lie in shared
            memory, and are valid until h further ones were asked for or the epoch ends. Saves a
            copy.

        Raises
        ------
        StageError : a stage failed on an item, which is told with the traceback of its process. The
            pipeline can begin another epoch.
        WorkerLostError : a process was killed, or nothing came for `timeout_s`. The pipeline is
            closed then.
        """
        if not self._end.alive:
            raise RuntimeError("this Pipeline was closed; make another one")
        if not 0 <= held < self._slots:
            raise ValueError(f"held={held} must be below slots={self._slots}, and not negative")
        given = list(items)
        self._epoch += 1
        for at, lane in enumerate(self._lanes):
            order = cloudpickle.dumps((self._epoch, given[at :: len(self._lanes)]), protocol=5)
            try:
                _write(lane.workers[0], order)
            except BrokenPipeError:
                self._lost(lane)
        return self._results(self._epoch, len(given), held)

    def _results(self, epoch: int, count: int, held: int) -> Iterator[Any]:
        in_use: list[ring.Consumer] = []
        try:
            for number in range(count):
                if epoch != self._epoch:
                    raise RuntimeError("another epoch of this Pipeline has begun")
                lane = self._lanes[number % len(self._lanes)]
                item = self._take(lane, epoch, copy=held == 0)
                assert lane.output is not None
                in_use.append(lane.output)
                if isinstance(item, Failure):
                    _raise(item)
                while len(in_use) > held:
                    in_use.pop(0).release()
                yield item
                del item
        finally:
            if self._end.alive:
                for output in in_use:
                    output.release()

    def _take(self, lane: _Lane, epoch: int, *, copy: bool) -> Any:
        assert lane.output is not None
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            try:
                taken = lane.output.take(_LOOK_S, copy=copy)
            except ring.RingEnded:
                self._lost(lane)
            for of_epoch, item in taken:
                if of_epoch == epoch:
                    return item
                lane.output.release()
            if not taken and any(worker.poll() is not None for worker in lane.workers):
                self._lost(lane)
        self.close()
        raise WorkerLostError(
            f"Pipeline: nothing came out of {self._titles[-1]} for {self._timeout_s} s, and no "
            "process has ended; a stage hangs, or pass a larger timeout_s"
        )

    def _lost(self, lane: _Lane) -> None:
        """Say which process has ended first, and how."""
        until = time.monotonic() + _END_S
        ended: list[tuple[int, int]] = []
        while time.monotonic() < until and not any(code != LEFT_ALONE for _, code in ended):
            codes = [worker.poll() for worker in lane.workers]
            ended = [(at, code) for at, code in enumerate(codes) if code is not None]
            time.sleep(0.01)  # between two looks at processes that are ending
        first = next(((at, code) for at, code in ended if code != LEFT_ALONE), (0, LEFT_ALONE))
        at, code = first
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        pid = lane.workers[at].pid
        self.close()
        raise WorkerLostError(
            f"Pipeline: the process of {self._titles[at]} (pid {pid}) {how}; look at what it has "
            "printed, or whether memory ran out, and make another Pipeline"
        )

    def _start(self, stages: list[tuple[str, bytes]]) -> None:
        lane = _Lane()
        self._lanes.append(lane)
        input: int | None = None
        try:
            for title, stage in stages:
                output = ring.create(self._slots, self._slot_bytes)
                pids = [worker.pid for worker in lane.workers]
                try:
                    worker = subprocess.Popen(
                        [sys.executable, "-c", _PROGRAM.format(path=sys.path)],
                        stdin=subprocess.PIPE,
                        pass_fds=[output] if input is None else [input, output],
                        bufsize=0,
                    )
                    lane.workers.append(worker)
                    setup = Setup(
                        stage, title, self._slot_bytes, input, pids[-1] if pids else 0, output
                    )
                    _write(worker, pickle.dumps(setup, protocol=5))
                finally:
                    if input is not None:
                        os.close(input)
                    input = output
            assert input is not None
            lane.output = ring.Consumer(input, lane.workers[-1].pid)
        finally:
            if input is not None:
                os.close(input)


_PROGRAM = "import sys; sys.path[:] = {path!r}; from hororing.data.worker import main; main()"


def _write(worker: subprocess.Popen[bytes], message: bytes) -> None:
    assert worker.stdin is not None
    view = memoryview(message)
    while view:
        view = view[os.write(worker.stdin.fileno(), view) :]


def _raise(failure: Failure) -> None:
    cause = None
    if failure.error is not None:
        cause = cloudpickle.loads(failure.error)
    raise StageError(f"{failure.title} failed on {failure.item}:\n\n{failure.trace}") from cause


def _end(lanes: list[_Lane], pid: int) -> None:
    """Close the pipes that keep the processes alive, and wait."""
    if os.getpid() != pid:
        return  # a forked child; the processes are its parent's
    workers = [worker for lane in lanes for worker in lane.workers]
    for worker in workers:
        if worker.stdin is not None:
            worker.stdin.close()
    for lane in lanes:
        if lane.output is not None:
            lane.output.close()
    until = time.monotonic() + _END_S
    for worker in workers:
        try:
            worker.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
