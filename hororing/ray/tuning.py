"""A search whose trials Ray Tune schedules over the nodes of a cluster, each with its own ranks."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule, PopulationBasedTraining

import hororing.numpy as hvd
from hororing.ray.executor import RayExecutor

_METRIC = "value"
_POLL_S = 0.05
_STATE = "state.pkl"
_MOST_STEPS = 10**9  # ASHA wants a maximum


class Trial:
    """What `train` gets: as the trial of the toolkit's search, for a function that runs in both.

    Attributes
    ----------
    number, seed : int
        Of the trial.
    params : dict
        Its values.
    process_set : ProcessSet
        All ranks of the trial, which are a job of their own.
    state : object
        What to go on from under population-based training; None: begin anew.
    first_step : int
        The step to begin with.
    """

    def __init__(
        self,
        number: int,
        params: dict[str, Any],
        seed: int,
        mailbox: Any,
        state: Any,
        first_step: int,
    ) -> None:
        self.number, self.params, self.seed = number, params, seed
        self.state, self.first_step = state, first_step
        self._mailbox = mailbox

    @property
    def process_set(self) -> hvd.ProcessSet:
        """All ranks."""
        return hvd.global_process_set

    def report(self, step: int, value: float, state: Any = None) -> None:
        """Report progress; all ranks together. The first rank's value and state are used.

        Ray Tune ends the processes of hopeless trials.
        """
        if hvd.rank() == 0:
            ray.get(self._mailbox.put.remote(int(step), float(value), state))
        hvd.barrier()


class _Mailbox:
    """An actor that holds the reports of one trial until Ray Tune has them."""

    def __init__(self) -> None:
        self._reports: list[tuple[int, float, Any]] = []

    def put(self, step: int, value: float, state: Any) -> None:
        self._reports.append((step, value, state))

    def take(self) -> list[tuple[int, float, Any]]:
        found, self._reports = self._reports, []
        return found


def search(
    space: Mapping[str, Any],
    train: Callable[[Trial], Any],
    *,
    trials: int = 64,
    ranks_per_trial: int = 1,
    scheduler: Any = "asha",
    maximize: bool = False,
    seed: int = 0,
    interval: int = 1,
    timeout_s: float = 600.0,
    name: str | None = None,
    storage_path: str | None = None,
    cpus_per_rank: int = 1,
    use_gpu: bool = False,
) -> Any:
    """Search over the nodes of a Ray cluster, with trials side by side; return Tune's ResultGrid.

    The same `train` runs under the `search` of the toolkit in one job on one host. Here each
    trial is a job of its own, whose ranks Ray places on any nodes. A trial that fails, or is
    silent for too long, ends alone.

    Parameters
    ----------
    space : mapping
        Name -> a range with `low`, `high`, `log` and `integer` (the toolkit's
        `Range`), a list of choices, or a domain of Ray Tune.
    train : callable
        Trains with `trial.params`, and returns the objective, or None: the latest report.
        `hvd.init()` has been called.
    trials : int, optional
        Number of trials; with "pbt", of members of the population.
    scheduler : str, BasePruner or None, optional
        "asha", "median", "pbt", None, or one of Ray Tune, whose metric is "value".
    interval : int, optional
        Number of reports between two exchanges, for "pbt" only.
    timeout_s : float, optional
        Seconds without a report after which a trial is given up.
    name, storage_path : str, optional
        Of the experiment, and where Ray Tune keeps it; default: ~/ray_results.
    cpus_per_rank, use_gpu : int, bool
        What Ray reserves for each rank.

    Raises
    ------
    ValueError : arguments that do not fit.

    Examples
    --------
    >>> found = hororing.ray.search({"lr": Range(1e-4, 1, log=True)}, train, trials=64)
    >>> found.get_best_result().config
    """
    if trials < 1 or ranks_per_trial < 1 or interval < 1 or not timeout_s > 0:
        raise ValueError(
            f"search: trials={trials}, ranks_per_trial={ranks_per_trial}, interval={interval} and "
            f"timeout_s={timeout_s} must be positive"
        )
    if interval != 1 and scheduler != "pbt":
        raise ValueError(f'search: interval={interval} has a meaning with scheduler="pbt" only')
    domains = {what: _domain(what, each) for what, each in space.items()}
    bundle = {"CPU": cpus_per_rank, **({"GPU": 1} if use_gpu else {})}
    # The first bundle is for the process that passes on reports, which needs nothing.
    resources = tune.PlacementGroupFactory([{}, *[bundle] * ranks_per_trial])
    settings: dict[str, Any] = {
        "train": train, "ranks": ranks_per_trial, "seed": seed, "timeout_s": timeout_s,
        "cpus": cpus_per_rank, "use_gpu": use_gpu,
    }  # fmt: skip

    def trainable(config: dict[str, Any]) -> None:
        _run_trial(config, **settings)

    tuner = tune.Tuner(
        tune.with_resources(trainable, resources),
        param_space=domains,
        tune_config=tune.TuneConfig(
            metric=_METRIC,
            mode="max" if maximize else "min",
            num_samples=trials,
            scheduler=_scheduler(scheduler, domains, interval, seed),
            search_alg=tune.search.BasicVariantGenerator(random_state=seed),
        ),
        run_config=tune.RunConfig(name=name, storage_path=storage_path, verbose=0),
    )
    return tuner.fit()


def _domain(what: str, each: Any) -> Any:
    if isinstance(each, tune.search.sample.Domain):
        return each
    if hasattr(each, "low") and hasattr(each, "high"):
        log, integer = getattr(each, "log", False), getattr(each, "integer", False)
        if integer:  # Tune's upper ends are excluded
            make = tune.lograndint if log else tune.randint
            return make(int(each.low), int(each.high) + 1)
        return (tune.loguniform if log else tune.uniform)(each.low, each.high)
    if isinstance(each, Sequence) and not isinstance(each, str) and each:
        return tune.choice(list(each))
    raise ValueError(f"search: {what} must be a range, a list of choices or a domain, not {each!r}")


def _scheduler(chosen: Any, domains: dict[str, Any], interval: int, seed: int) -> Any:
    if chosen == "asha":
        return ASHAScheduler(time_attr="training_iteration", max_t=_MOST_STEPS, reduction_factor=3)
    if chosen == "median":
        return MedianStoppingRule(time_attr="training_iteration", grace_period=1)
    if chosen == "pbt":
        return PopulationBasedTraining(
            time_attr="training_iteration",
            perturbation_interval=interval,
            hyperparam_mutations=domains,
        )
    if isinstance(chosen, str):
        raise ValueError(
            f'search: scheduler={chosen!r} is not "asha", "median", "pbt", one of Ray Tune, or None'
        )
    return chosen


def _run_trial(
    config: dict[str, Any],
    train: Callable[[Trial], Any],
    ranks: int,
    seed: int,
    timeout_s: float,
    cpus: int,
    use_gpu: bool,
) -> None:
    """In the process of Tune's trial: start the ranks, and pass on what they report."""
    number = int(tune.get_context().get_trial_id().rsplit("_", 1)[-1])
    state, first_step = _restored()
    mailbox = ray.remote(_Mailbox).options(num_cpus=0).remote()

    def on_rank() -> Any:
        hvd.init()
        return train(Trial(number, config, seed + number, mailbox, state, first_step))

    executor = RayExecutor(
        RayExecutor.create_settings(), num_workers=ranks, cpus_per_worker=cpus, use_gpu=use_gpu
    )
    executor.start()
    last = None
    try:
        references = executor.run_remote(on_rank)
        pending = list(references)
        heard = time.monotonic()
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=_POLL_S)
            ray.get(done)  # raises the error of a rank
            for step, value, kept in ray.get(mailbox.take.remote()):
                heard, last = time.monotonic(), value
                _pass_on(step, value, kept)
            if time.monotonic() > heard + timeout_s:
                raise TimeoutError(f"trial {number}: no report and no end for {timeout_s:g} s")
        result = ray.get(references[0])
        if result is not None and result != last:
            tune.report({_METRIC: float(result)})
    finally:
        executor.shutdown()
        ray.kill(mailbox)


def _pass_on(step: int, value: float, state: Any) -> None:
    figures = {_METRIC: value, "step": step}
    if state is None:
        tune.report(figures)
        return
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, _STATE), "wb") as file:
            pickle.dump((state, step + 1), file)
        tune.report(figures, checkpoint=tune.Checkpoint.from_directory(folder))


def _restored() -> tuple[Any, int]:
    """The state of this trial, or of the one that it takes over, and its next step."""
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return None, 0
    with checkpoint.as_directory() as folder, open(os.path.join(folder, _STATE), "rb") as file:
        state, step = pickle.load(file)
    return state, step
