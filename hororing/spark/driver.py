"""The part of `hororing.spark.run` in the driver."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pyspark import InheritableThread, SparkContext

from hororing._job.rendezvous import protocol
from hororing._job.rendezvous.store import Store
from hororing.errors import RunError
from hororing.hororun.call import describe
from hororing.hororun.function import results
from hororing.hororun.job import start
from hororing.hororun.job.ending import describe as describe_code
from hororing.spark.task import Outcome, TaskSettings, run_rank

_CHECK_S = 0.5
_PRINTED = "what ranks print is in the logs of Spark's executors"
_MPI = "there is no MPI between these ranks"


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, Any] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Iterable[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every rank of a new job, and return the results by rank.

    Blocks until all ranks have ended. They run at the same time, each in a Spark task; those of a
    host are adjacent. Nothing is retried.

    Parameters
    ----------
    fn : callable
        Any callable that cloudpickle can pickle. It calls `hvd.init()` itself.
    num_proc : int, optional
        The number of ranks. None: Spark's default parallelism.
    start_timeout : float, optional
        How long Spark may take until all tasks run, in seconds. None: 600.
    env : dict, optional
        Variables for all ranks, in addition to those of the executors, and to the HORORING_*
        and HOROVOD_* variables of this process.
    nics : iterable of str or str, optional
        Network interfaces, as HORORING_INTERFACE.
    executable : str, optional
        The Python of the ranks. None: that of the executors.
    use_gloo, verbose : bool or int, optional
        No effect.
    use_mpi, extra_mpi_args, stdout, stderr, prefix_output_with_timestamp : optional
        Errors, if given.

    Raises
    ------
    RunError : a rank raised an exception (which is the cause, if it can be pickled), was killed,
        or lost its task; or the tasks did not start in time.
    TypeError : `fn` or its arguments cannot be pickled.
    ValueError : an argument that cannot be satisfied, or there is no SparkContext.
    KeyboardInterrupt : Ctrl-C; the tasks were cancelled.
    """
    for name, value, why in (
        ("use_mpi", use_mpi, _MPI),
        ("extra_mpi_args", extra_mpi_args, _MPI),
        ("stdout", stdout, _PRINTED),
        ("stderr", stderr, _PRINTED),
        ("prefix_output_with_timestamp", prefix_output_with_timestamp, _PRINTED),
    ):
        if value:
            raise ValueError(f"run: {name}={value!r}: {why}")
    context = SparkContext._active_spark_context
    if context is None:
        raise ValueError(
            "run: there is no SparkContext: make a SparkSession first; Spark Connect has none"
        )
    size = context.defaultParallelism if num_proc is None else num_proc
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"run: num_proc={num_proc!r} is not a whole number from 1")
    variables = {
        **start.settings(),
        **start.network(nics),
        **start.given(env),
    }
    payload = describe(fn, tuple(args), dict(kwargs or {}))
    several = not context.master.startswith("local")
    store, secret = start.new_store(size, several)
    store.start_thread()
    try:
        host = context.getConf().get("spark.driver.host") if several else "127.0.0.1"
        address = protocol.show_address(str(host), store.port)
        task = TaskSettings(store.job, address, secret, variables, executable, payload)
        outcomes = _collect(context, size, partial(run_rank, task), store, start_timeout or 600.0)
    finally:
        store.stop()
    return results(_Ended(outcomes), size)


class _Ended:
    """All outcomes, in the form of `function.Ended`."""

    def __init__(self, outcomes: Iterable[Outcome]) -> None:
        self._outcomes = {each.rank: each for each in outcomes}
        self.results = {rank: each.answer for rank, each in self._outcomes.items() if each.answer}
        # First one that was killed, then one that just ended: others may have failed because of it.
        failed = sorted(
            (each.code > 0, each.rank in self.results, each.rank, each.code)
            for each in self._outcomes.values()
            if each.code
        )
        self.failed = failed[0][2:] if failed else None

    def name(self, rank: int) -> str:
        return f"rank {rank} on host {self._outcomes[rank].host}"

    def end_report(self, rank: int, code: int) -> list[str]:
        lines = self._outcomes[rank].last_lines
        last = "; the last lines of its standard error:" if lines else ""
        return [f"{self.name(rank)} {describe_code(code)}{last}", *lines]


def _collect(
    context: SparkContext,
    size: int,
    task: Callable[[Iterable[int]], Iterator[Outcome]],
    store: Store,
    start_timeout_s: float,
) -> list[Outcome]:
    """Run the tasks in a thread, which may be abandoned: Spark itself waits for slots.

    Spark does not retry a barrier stage whose results are collected.
    """
    group = f"hororing-{secrets.token_hex(4)}"
    done = threading.Event()
    outcomes: list[Outcome] = []
    errors: list[Exception] = []

    def collect() -> None:
        try:
            context.setJobGroup(group, "hororing.spark.run", interruptOnCancel=True)
            parts = context.parallelize(range(size), size).barrier().mapPartitions(task)
            outcomes.extend(parts.collect())
        except Exception as error:
            errors.append(error)
        finally:
            done.set()

    InheritableThread(target=collect, daemon=True).start()
    try:
        _watch(context, group, done, size, start_timeout_s)
    except BaseException:
        context.cancelJobGroup(group)
        raise
    if errors:
        why = getattr(errors[0], "java_exception", errors[0])  # without the Java stack
        rank = next(iter(store.lost), -1)  # the first whose connection has ended
        lost = f" (rank {rank} was lost first)" if rank >= 0 else ""
        raise RunError(f"run: Spark could not run the tasks{lost}: {why}", rank) from errors[0]
    return outcomes


def _watch(
    context: SparkContext, group: str, done: threading.Event, size: int, start_timeout_s: float
) -> None:
    """Wait for the end. RunError if the tasks do not start in time."""
    tracker = context.statusTracker()
    until = time.monotonic() + start_timeout_s
    begun = False
    while not done.wait(_CHECK_S):
        jobs = [tracker.getJobInfo(number) for number in tracker.getJobIdsForGroup(group)]
        stages = [tracker.getStageInfo(number) for job in jobs if job for number in job.stageIds]
        begun |= any(stage and stage.numActiveTasks for stage in stages)
        if not begun and time.monotonic() > until:
            raise RunError(
                f"run: Spark has not started {size} tasks at once within "
                f"{start_timeout_s:g} s (start_timeout): are there as many cores? num_proc gives "
                "the number of ranks"
            )
