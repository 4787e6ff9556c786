"""The call: process sets, connections, and the result."""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import hororing.numpy as hvd
from hororing.extension import ProcessSet, host_names
from hororing.toolkit.search.hub import GRACE_S, Hub
from hororing.toolkit.search.plans import Assignment, Plan, Trials
from hororing.toolkit.search.population import Population
from hororing.toolkit.search.trial import Outcome, Trial
from hororing.toolkit.search.worker import Worker
from hororing.toolkit.tracking.circumstances import circumstances
from hororing.toolkit.tracking.run_file import RunFile
from hororing.toolkit.tracking.sweep import Found, Range, Space, distributions, open_study


@dataclass(frozen=True)
class SearchResult(Found):
    """The best trial, and all of them, on every rank; `study` is Optuna's, on rank 0.

    Attributes
    ----------
    trials : list of Outcome
        How each ended, in the order of their ends.
    busy : float
        The share of the time, from the first begin to the last end, in which ranks trained.
    gap_s : float
        The longest time of a rank between two trials, in seconds.
    lost : list of int
        Ranks that hang in a trial: what needs all ranks would wait for them.
    """

    trials: list[Outcome] = field(default_factory=list)
    busy: float = 0.0
    gap_s: float = 0.0
    lost: list[int] = field(default_factory=list)


def search(
    space: Space,
    train: Callable[[Trial], Any],
    *,
    trials: int = 64,
    ranks_per_trial: int = 1,
    scheduler: Any = "asha",
    sampler: Any = None,
    first: Sequence[Mapping[str, Any]] = (),
    maximize: bool = False,
    seed: int = 0,
    interval: int = 1,
    timeout_s: float = 600.0,
    storage: Any = None,
    name: str = "search",
    folder: str | os.PathLike[str] | None = None,
) -> SearchResult:
    """Search with several trials at a time; all ranks of the job call it, and get the result.

    Each trial runs on `ranks_per_trial` consecutive ranks, which form a process set. Their
    processes stay: the next trial begins at once. A trial that raises an error, returns or reports
    no finite number, or is silent for `timeout_s`, is recorded as failed, and its ranks go on with
    the next one.

    Blocks until the search has ended. Call it in the main thread: only there can a trial that
    hangs be interrupted, in Python code, system calls and collectives.

    Parameters
    ----------
    space : mapping
        Name -> `Range` or a list of choices.
    train : callable
        Trains with `trial.params` on the ranks of `trial.process_set`, calls ``trial.report(step,
        value)``, and returns the objective, or None: the latest report. The set's first rank
        counts. With "pbt" it is called again for each part of a training, with `trial.state` and
        `trial.first_step`; for the last time when no step is left.
    trials : int, optional
        Number of trials; with "pbt", of members of the population.
    ranks_per_trial : int, optional
        Divides the number of ranks. If it is all of them, a trial that only some ranks leave ends
        the search, as all ranks have no process set that could be replaced.
    scheduler : str, BasePruner or None, optional
        Which trials stop early: "asha" (Optuna's successive halving, asynchronous), "median", a
        pruner of Optuna, or None: none of them. "pbt": population-based training
        (arXiv:1711.09846): after every `interval` reports of all members, the worst quarter takes
        over weights and values of the best quarter, with the values changed.
    sampler : BaseSampler, optional
        Of Optuna; default: random. With the random one, the trials are the same however many run
        side by side.
    first : sequence of mapping, optional
        Values to begin with, such as the present ones; part of `trials`.
    seed : int, optional
        Of the sampler, and of `trial.seed`.
    interval : int, optional
        Number of reports between two exchanges, for "pbt" only.
    timeout_s : float, optional
        Seconds without a sign of a trial after which it is given up.
    storage : str or BaseStorage, optional
        Of Optuna: a URL such as ``sqlite:///search.db``, or an object, of which rank 0's counts;
        default: in memory. An existing study of this `name` continues, with `trials` more; not with
        "pbt".
    folder : path, optional
        Records of the trials, for ``python -m hororing runs``; None: none.

    Raises
    ------
    ModuleNotFoundError : Optuna is not installed on rank 0.
    ValueError : arguments that do not fit; several hosts, over which `hororing.ray.search` runs
        trials; `init` was called without ``process_sets="dynamic"``.
    RuntimeError : no trial had a result; a rank has left the search, as by Ctrl-C.
    OSError : rank 0 cannot make a socket in its folder of temporary files.

    Examples
    --------
    >>> def train(trial):
    ...     for epoch in range(3):
    ...         loss = abs(trial.params["lr"] - 0.1)  # train here, on trial.process_set
    ...         trial.report(epoch, loss)
    ...     return loss
    >>> found = search({"lr": Range(1e-4, 1, log=True)}, train, trials=20)
    >>> found.value < 0.1
    True
    """
    if not hvd.is_initialized():
        hvd.init(process_sets="dynamic")
    _check(space, first, trials, ranks_per_trial, scheduler, interval, timeout_s, storage)
    optuna, study = open_study(
        "search", name, storage, maximize, _pruner(scheduler),
        sampler or (lambda module: module.samplers.RandomSampler(seed=seed)),
    )  # fmt: skip
    plan: Plan | None = None
    if study is not None:
        ranges = distributions(optuna, space)
        for values in first:
            study.enqueue_trial(dict(values))
        plan = Trials(optuna, study, ranges, trials, seed)
        if scheduler == "pbt":
            plan = Population(optuna, study, ranges, trials, seed, interval, maximize)
    ranks = range(hvd.size())
    rows = [[*ranks[i : i + ranks_per_trial]] for i in range(0, hvd.size(), ranks_per_trial)]
    socket = _listen()
    sets = _sets(rows)
    record = _recorder(folder, name, maximize) if hvd.rank() == 0 else None

    def make_hub(connections: list[Connection]) -> Hub:
        assert plan is not None
        assert record is not None
        return Hub(plan, connections, rows, len(rows) > 1, timeout_s, record)

    connection = _connected(socket, make_hub)
    message = Worker(connection, sets, train, timeout_s + 2 * GRACE_S).run()
    if not message["lost"]:
        connection.close()
    if "error" in message:
        raise RuntimeError(f"search: {message['error']}")
    if message["best"] is None:
        reasons = list(dict.fromkeys(each.why for each in message["outcomes"]))[:3]
        raise RuntimeError(
            f"search: none of {len(message['outcomes'])} trials had a result: {'; '.join(reasons)}"
        )
    params, value = message["best"]
    return SearchResult(
        params, value, study, message["outcomes"], message["busy"], message["gap_s"],
        message["lost"],
    )  # fmt: skip


def _check(
    space: Space,
    first: Sequence[Mapping[str, Any]],
    trials: int,
    ranks_per_trial: int,
    scheduler: Any,
    interval: int,
    timeout_s: float,
    storage: Any,
) -> None:
    size = hvd.size()
    if trials < 1 or interval < 1:
        raise ValueError(f"search: trials={trials} and interval={interval} must be at least 1")
    if ranks_per_trial < 1 or size % ranks_per_trial:
        raise ValueError(
            f"search: ranks_per_trial={ranks_per_trial} must divide the {size} ranks of the job"
        )
    if isinstance(scheduler, str) and scheduler not in ("asha", "median", "pbt"):
        raise ValueError(
            f'search: scheduler={scheduler!r} is not "asha", "median" or "pbt", a pruner of '
            "Optuna, or None"
        )
    if scheduler != "pbt" and interval != 1:
        raise ValueError(f'search: interval={interval} has a meaning with scheduler="pbt" only')
    if scheduler == "pbt" and storage is not None:
        raise ValueError('search: storage= is not possible with scheduler="pbt": weights are lost')
    if not timeout_s > 0:
        raise ValueError(f"search: timeout_s={timeout_s} must be seconds above 0")
    for what, values in space.items():
        if not isinstance(values, Range) and (isinstance(values, str) or not len(values)):
            raise ValueError(f"search: {what} must be a Range or a list of choices, not {values!r}")
    for each in first:
        if unknown := set(each) - set(space):
            raise ValueError(f"search: first has {sorted(unknown)}, which space lacks")
    hosts = [*dict.fromkeys(host_names())]
    if len(hosts) > 1:
        raise ValueError(
            f"search: the ranks are on {len(hosts)} hosts ({', '.join(hosts[:3])}); it works on "
            "one host. Over several hosts, use hororing.ray.search"
        )


def _pruner(scheduler: Any) -> Any:
    if scheduler == "asha":
        return lambda optuna: optuna.pruners.SuccessiveHalvingPruner(
            min_resource=1, reduction_factor=3
        )
    if scheduler in (None, "pbt"):
        return lambda optuna: optuna.pruners.NopPruner()
    return None if scheduler == "median" else scheduler


def _sets(rows: list[list[int]]) -> list[ProcessSet]:
    """Registered process sets; the global one, if it is the only one."""
    if len(rows) == 1:
        return [hvd.global_process_set]
    return [hvd.add_process_set(row) for row in rows]


@dataclass(frozen=True)
class _Socket:
    """Where the hub is, on every rank; on rank 0, what listens there."""

    path: str
    key: bytes
    listener: Listener | None
    folder: Any


def _listen() -> _Socket:
    """Make the hub's socket on rank 0; all ranks together."""
    found: tuple[str, bytes] | str = ""
    folder, listener = None, None
    if hvd.rank() == 0:
        try:
            folder = tempfile.TemporaryDirectory(prefix="hororing-")  # for its owner only
            found = (os.path.join(folder.name, "hub"), secrets.token_bytes(32))
            listener = Listener(found[0], "AF_UNIX", backlog=hvd.size(), authkey=found[1])
        except OSError as error:
            where = f"in the folder {tempfile.gettempdir()} (TMPDIR)"
            found = f"search: rank 0 cannot make a socket {where}: {error}"
    found = hvd.broadcast_object(found, name="search.hub")
    if isinstance(found, str):
        raise OSError(found)
    return _Socket(*found, listener, folder)


def _connected(to: _Socket, make_hub: Callable[[list[Connection]], Hub]) -> Connection:
    """Start the hub on rank 0, and return this rank's connection to it."""
    if to.listener is not None:
        threading.Thread(target=_accept_and_run, args=(to, make_hub), daemon=True).start()
    connection: Connection = Client(to.path, "AF_UNIX", authkey=to.key)
    connection.send(hvd.rank())
    return connection


def _accept_and_run(to: _Socket, make_hub: Callable[[list[Connection]], Hub]) -> None:
    assert to.listener is not None
    connections: dict[int, Connection] = {}
    while len(connections) < hvd.size():
        accepted = to.listener.accept()
        connections[accepted.recv()] = accepted
    to.listener.close()
    to.folder.cleanup()
    make_hub([connections[rank] for rank in sorted(connections)]).run()


def _recorder(
    folder: str | os.PathLike[str] | None, name: str, maximize: bool
) -> Callable[[Assignment, Outcome], None]:
    if folder is None:
        return lambda trial, outcome: None
    around = circumstances()
    began = time.strftime("%Y%m%d-%H%M%S")
    upwards = ["value"] if maximize else []

    def record(trial: Assignment, outcome: Outcome) -> None:
        run = f"{name}-{began}-{trial.number:04d}"
        file = RunFile.of(folder, run)
        file.begin({
            **around, "name": run, "config": trial.params, "seed": trial.seed,
            "maximize": upwards, "ranks": len(outcome.ranks),
        })  # fmt: skip
        for step, value in trial.reports:
            file.log(step, {"value": value})
        if not trial.reports and outcome.value is not None:
            file.log(0, {"value": outcome.value})
        if outcome.why:
            file.note(outcome.why)
        file.close(outcome.status)

    return record
