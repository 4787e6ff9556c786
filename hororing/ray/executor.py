"""Ranks that are Ray actors, with the methods of Horovod's RayExecutor."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import get_current_placement_group, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hororing._engine.shutdown import shutdown
from hororing._job.rendezvous.store import Store
from hororing.errors import PeerLostError, RunError, ShutDownError
from hororing.hororun.flags.elastic import Elastic
from hororing.hororun.job import plan
from hororing.ray import elastic, ranks
from hororing.ray.ranks import Location

# How long the other ranks may continue after a failure, and how long they may take to shut down.
_GRACE_S = 5.0


@dataclass(frozen=True)
class Settings:
    """The result of `RayExecutor.create_settings`."""

    timeout_s: float = 300.0
    placement_group_timeout_s: float = 100.0
    nics: Sequence[str] | str | None = None


class RayExecutor:
    """The ranks of a job as Ray actors, which live from `start` to `shutdown`.

    The actors of a node have adjacent ranks. This process is not a rank; when it ends, the actors
    end, too.

    Parameters
    ----------
    settings : Settings, optional
        From `create_settings`.
    num_workers : int, optional
        The number of ranks, on any nodes; or.
    num_hosts, num_workers_per_host : int, optional
        The number of nodes, and of ranks on each.
    cpus_per_worker : int, optional
        The number of CPUs that Ray reserves for each rank.
    use_gpu, gpus_per_worker : bool or int, optional
        Likewise; by default one GPU for each. A rank sees the GPUs of all ranks of its node, so
        that `hvd.local_rank()` is the index of its own.
    use_current_placement_group : bool, optional
        If this process runs in a placement group, so do the actors; only with `num_workers`,
        and not in an elastic job.
    min_workers, max_workers : int, optional
        With one of these the job is elastic (docs/elastic.md): `run` calls the result of
        `hvd.elastic.run` in new actors. It continues without lost actors while there are
        `min_workers`, and replaces them. It begins with at least `num_workers` (`min_workers`),
        and uses as many as fit into the cluster, up to `max_workers`.
    reset_limit : int, optional
        The maximum number of changes of members; None: no limit.
    cooldown_range : tuple of float, optional
        Minimum and maximum time until another actor replaces a failed one, in seconds.
    elastic_timeout : float, optional
        Maximum time with fewer than `min_workers`, in seconds.
    override_discovery : bool, optional
        False is an error, because Ray discovers the hosts.

    Raises
    ------
    ValueError : arguments that do not fit, or cannot be satisfied.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: tuple[float, float] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        is_elastic = min_workers is not None or max_workers is not None
        if is_elastic and num_hosts is not None:
            raise ValueError("RayExecutor: num_hosts excludes min_workers and max_workers")
        if num_hosts is None and num_workers_per_host != 1:
            raise ValueError("RayExecutor: num_workers_per_host needs num_hosts")
        for name, value, default in (
            ("reset_limit", reset_limit, None),
            ("cooldown_range", cooldown_range, None),
            ("elastic_timeout", elastic_timeout, 600),
        ):
            if not is_elastic and value != default:
                raise ValueError(f"RayExecutor: {name}={value!r} needs min_workers or max_workers")
        if not override_discovery:
            raise ValueError(
                "RayExecutor: override_discovery=False: Ray discovers the hosts; to find hosts "
                "by a script, use hororun --host-discovery-script"
            )
        if not is_elastic and (num_workers is None) == (num_hosts is None):
            raise ValueError(
                f"RayExecutor: num_workers={num_workers}, num_hosts={num_hosts}: give one of them, "
                "or min_workers"
            )
        for name, number in (
            ("num_workers", 1 if num_workers is None else num_workers),
            ("num_hosts", 1 if num_hosts is None else num_hosts),
            ("min_workers", 1 if min_workers is None else min_workers),
            ("max_workers", 1 if max_workers is None else max_workers),
            ("num_workers_per_host", num_workers_per_host),
            ("gpus_per_worker", 1 if gpus_per_worker is None else gpus_per_worker),
        ):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"RayExecutor: {name}={number!r} is not a whole number from 1")
        if gpus_per_worker is not None and not use_gpu:
            raise ValueError(f"RayExecutor: gpus_per_worker={gpus_per_worker} needs use_gpu=True")
        self._settings = settings or Settings()
        self._size = num_workers or (num_hosts or 0) * num_workers_per_host
        self._per_bundle = 1 if num_hosts is None else num_workers_per_host
        self._on_different_hosts = num_hosts is not None
        self._resources = {
            "CPU": cpus_per_worker,
            "GPU": (gpus_per_worker or 1) if use_gpu else 0,
        }
        self._in_current_group = use_current_placement_group
        self._elastic: Elastic | None = None
        if is_elastic:
            self._elastic = elastic.chosen(
                num_workers, min_workers, max_workers, reset_limit, cooldown_range, elastic_timeout
            )
        self._call: Callable[[Callable[[Any], Any]], list[Any]] | None = None  # for an elastic job
        self._group: Any = None  # our placement group
        self._workers: list[Any] = []  # handles of actors, by rank
        self._locations: list[Location] = []
        self._store: Store | None = None

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 300.0,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100.0,
        nics: Sequence[str] | str | None = None,
        verbose: Any = None,
    ) -> Settings:
        """Make the first argument of `RayExecutor`.

        Parameters
        ----------
        timeout_s : float, optional
            How long actors may take to start, in seconds. In an elastic job, the executor's
            `elastic_timeout` limits this and the next one.
        placement_group_timeout_s : float, optional
            How long Ray may take to place them, in seconds.
        nics : sequence of str or str, optional
            Network interfaces, as HORORING_INTERFACE.
        verbose : int, optional
            No effect.
        ssh_identity_file, ssh_str : str, optional
            An error, because Ray starts the actors.
        """
        if ssh_identity_file or ssh_str:
            raise ValueError(
                "create_settings: ssh_identity_file and ssh_str have no meaning: Ray starts the "
                "actors, without ssh"
            )
        return Settings(timeout_s, placement_group_timeout_s, nics)

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the actors. Blocks until all have started.

        In an elastic job, `run` and `execute` start and end the actors.

        Parameters
        ----------
        executable_cls : callable, optional
            Each rank makes an object of it, for `execute`.
        executable_args, executable_kwargs : sequence or dict, optional
            Its arguments.
        extra_env_vars : dict, optional
            Variables for all ranks, in addition to the HORORING_* and HOROVOD_* variables of
            this process.

        Raises
        ------
        RunError : no room in the cluster, or an actor does not start; all are ended then.
        ValueError : this process is connected by Ray Client.
        """
        if self._workers or self._call:
            raise RunError("start: the actors are there already: call shutdown() first")
        if ray.util.client.ray.is_connected():
            raise ValueError(
                "start: this process is connected by Ray Client (ray://), so that actors do not "
                "reach it: start it in the cluster, as by `ray job submit`"
            )
        args, kwargs = tuple(executable_args or ()), dict(executable_kwargs or {})
        if self._elastic is not None:
            make = functools.partial(executable_cls, *args, **kwargs) if executable_cls else None
            variables = ranks.variables(self._settings.nics, extra_env_vars)
            self._call = functools.partial(
                elastic.run, self._elastic, self._resources, variables, make
            )
            return
        try:
            self._start(extra_env_vars)
            if executable_cls is not None:
                self._all("start", "make", executable_cls, args, kwargs)
        except BaseException:
            self.shutdown()
            raise

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Any = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on all ranks, and return the results by rank.

        Blocks until all have returned; in an elastic job, all remaining ranks. `callbacks` are an
        error.

        Raises
        ------
        RunError : a rank raised an exception, which is the cause, or its actor died; `rank` says
            which. The other ranks get 5 s to return as well. If all do and no actor has died, the
            executor can be used again; otherwise all actors were ended, and `start` may follow.
            In an elastic job: it cannot continue; `rank` is then the number of a process.
        KeyboardInterrupt : all actors were ended.
        """
        if callbacks:
            raise ValueError("run: callbacks are not supported: rank 0 can write to a file instead")
        return self._execute("run", _call_of(fn, args, kwargs))

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Like `run`, but returns references for `ray.get` at once.

        If a rank fails, the others may wait for it: `shutdown` ends them.
        """
        return self._submit("run_remote", "execute", _call_of(fn, args, kwargs))

    def execute(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call `fn` on all ranks with the rank's `executable_cls` object; otherwise as `run`."""
        return self._execute("execute", fn)

    def _execute(self, doing: str, fn: Callable[[Any], Any]) -> list[Any]:
        return self._call(fn) if self._call else self._all(doing, "execute", fn)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Like `execute`, on rank 0 alone. Returns its result."""
        self._check_started("execute_single")
        return self._results("execute_single", [self._workers[0].execute.remote(fn)])[0]

    def shutdown(self) -> None:
        """End all actors, if there are any."""
        if self._store is not None and ray.is_initialized():
            # Ranks that still work must not mistake the end of others for a failure.
            leaving = [worker.leave.remote() for worker in self._workers]
            ray.wait(leaving, num_returns=len(leaving), timeout=_GRACE_S)
        self._end()

    # -----------------------------------------------------------------------------------------
    # Start and end

    def _start(self, more: Mapping[str, Any] | None) -> None:
        group = self._placement_group()
        cpus, gpus = self._resources["CPU"], self._resources["GPU"]
        self._workers = [
            ray.remote(_Worker)
            .options(
                num_cpus=cpus,
                num_gpus=gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, -1 if self._group is None else i // self._per_bundle
                ),
            )
            .remote()
            for i in range(self._size)
        ]
        locations = self._all("start", "locate", timeout_s=self._settings.timeout_s)
        order = plan.neighbours([each.node for each in locations])
        self._workers = [self._workers[i] for i in order]
        self._locations = [locations[i] for i in order]
        variables = ranks.variables(self._settings.nics, more)
        self._store, secret, environments = ranks.start_store(self._locations, variables)
        self._results(
            "start",
            [
                worker.become.remote(each, secret)
                for worker, each in zip(self._workers, environments, strict=True)
            ],
        )

    def _placement_group(self) -> Any:
        if self._in_current_group and not self._on_different_hosts:
            current = get_current_placement_group()
            if current is not None:
                return current
        bundle = {name: n * self._per_bundle for name, n in self._resources.items() if n}
        self._group = placement_group(
            [bundle] * (self._size // self._per_bundle),
            strategy="STRICT_SPREAD" if self._on_different_hosts else "PACK",
        )
        timeout_s = self._settings.placement_group_timeout_s
        if not self._group.wait(timeout_s):
            spread = " on different nodes" if self._on_different_hosts else ""
            raise RunError(
                f"start: the cluster had no room for {self._group.bundle_count} times {bundle}"
                f"{spread} within {timeout_s:g} s; it has {ray.cluster_resources()}, of which are "
                f"free {ray.available_resources()}"
            )
        return self._group

    def _end(self) -> None:
        if ray.is_initialized():  # otherwise they have ended with Ray
            for worker in self._workers:
                ray.kill(worker)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
        self._workers, self._locations, self._group, self._call = [], [], None, None
        if self._store is not None:
            self._store.stop()
            self._store = None

    # -----------------------------------------------------------------------------------------
    # Calls

    def _check_started(self, doing: str) -> None:
        if self._call:
            raise RunError(f"{doing}: the ranks of an elastic job change: call run()")
        if not self._workers:
            raise RunError(f"{doing}: there are no actors: call start() first")

    def _submit(self, doing: str, method: str, *args: Any) -> list[Any]:
        self._check_started(doing)
        return [getattr(worker, method).remote(*args) for worker in self._workers]

    def _all(
        self, doing: str, method: str, *args: Any, timeout_s: float | None = None
    ) -> list[Any]:
        return self._results(doing, self._submit(doing, method, *args), timeout_s)

    def _results(
        self, doing: str, references: Sequence[Any], timeout_s: float | None = None
    ) -> list[Any]:
        """Return the answers of ranks, by rank."""
        pending = {reference: rank for rank, reference in enumerate(references)}
        results: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        until = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while pending:
                left_s = None if until is None else max(until - time.monotonic(), 0.0)
                done, _ = ray.wait(list(pending), timeout=left_s)
                if not done:
                    break
                rank = pending.pop(done[0])
                try:
                    results[rank] = ray.get(done[0])
                except Exception as error:
                    if not failed:
                        until = time.monotonic() + _GRACE_S
                    failed[rank] = error
        except BaseException:  # Ctrl-C: it is unknown when the actors would be free again
            self._end()
            raise
        if not pending and not failed:
            return [results[rank] for rank in range(len(references))]
        self._fail(doing, failed, sorted(pending.values()))

    def _fail(
        self, doing: str, failed: Mapping[int, Exception], pending: Sequence[int]
    ) -> NoReturn:
        names = [self._name(rank) for rank in range(self._size)]
        late = ", ".join(names[rank] for rank in pending)
        dead = [rank for rank, error in failed.items() if isinstance(error, RayActorError)]
        if dead or pending:
            self._end()
        if not failed:
            raise RunError(
                f"{doing}: no answer in time from {late}; all actors have been ended", pending[0]
            )
        own = [rank for rank, error in failed.items() if not _is_by_peers(error)]
        rank = [*dead, *own, *failed][0]
        error = failed[rank]
        rest = f"; {late} did not return, so all actors have been ended" if late else ""
        if isinstance(error, RayTaskError):
            cause = error.cause
            raise RunError(
                f"{doing}: {names[rank]} raised {type(cause).__name__}: {cause}{rest}\n\n{error}",
                rank, 1, str(error),
            ) from cause  # fmt: skip
        what = "has died" if dead else "has not answered"
        raise RunError(
            f"{doing}: the actor of {names[rank]} {what}: {error}{rest}", rank
        ) from error

    def _name(self, rank: int) -> str:
        if not self._locations:  # no actor has a rank yet
            return f"actor {rank}"
        return f"rank {rank} on {self._locations[rank].address}"


class _Worker:
    """The actor of a rank."""

    def __init__(self) -> None:
        self._executable: Any = None

    def locate(self) -> Location:
        return ranks.locate()

    def become(self, variables: Mapping[str, str], secret: bytes) -> None:
        ranks.become(variables, secret)

    def make(self, cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._executable = cls(*args, **kwargs)

    def execute(self, fn: Callable[[Any], Any]) -> Any:
        return fn(self._executable)

    def leave(self) -> None:
        shutdown()


def _call_of(
    fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Callable[[Any], Any]:
    positional, named = tuple(args or ()), dict(kwargs or {})
    return lambda _: fn(*positional, **named)


def _is_by_peers(error: Exception) -> bool:
    """Whether it was caused by another rank's end."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return isinstance(cause, (PeerLostError, ShutDownError))
