"""`hororing.run` of an elastic job: its settings and results."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from hororing.errors import RunError
from hororing.hororun.flags import elastic
from hororing.hororun.flags.elastic import Elastic
from hororing.hororun.flags.host_lists import Host
from hororing.hororun.job.elastic import ElasticJob

_NUMBERS = {"num_proc": "np", "min_np": "min_np", "max_np": "max_np", "slots_per_host": "slots"}


def chosen(
    asked: Mapping[str, Any], named: list[Host], variables: Mapping[str, str]
) -> Elastic | None:
    """The elastic settings, from the names of hororun's flags. None: the job is not elastic.

    ValueError.
    """
    for flag, name in _NUMBERS.items():
        value = asked[flag]
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}={value!r} is not a whole number from 1")
    flags = argparse.Namespace(**dict.fromkeys(elastic.NOT_ELASTIC), **asked)
    return elastic.chosen(flags, lambda: named, variables)


class EndedElastic:
    """An elastic job that has ended, in the form that `function.results` needs.

    Ranks are the final ones; if the job has failed, process numbers.

    Raises
    ------
    RunError : it has failed, and no process has reported an error.
    """

    def __init__(self, job: ElasticJob) -> None:
        self._job = job
        first = job.first_failed
        if job.why and first is None:
            raise RunError(f"run: the job has failed: {job.why}")
        self.failed = (first.number, first.code or 1) if job.why and first is not None else None
        # Processes that the job no longer needed have ended normally, too, but without a result.
        done = [
            each
            for each in job.processes
            if each.status == each.code == 0 and (job.results.get(each.number) or not each.leaves)
        ]
        if not (job.why or done):
            raise RunError("run: the job has ended before a process had called hvd.init()")
        done.sort(key=lambda each: (each.generation, each.rank or 0))
        if job.why:
            self.results = dict(job.results)
        else:
            self.results = {rank: job.results[each.number] for rank, each in enumerate(done)}

    def name(self, rank: int) -> str:
        """Like `FixedJob.name`."""
        return self._job.processes[rank].name(False) if self._job.why else f"rank {rank}"

    def end_report(self, rank: int, code: int) -> list[str]:
        """Like `FixedJob.end_report`."""
        lines = self._job.end_report(self._job.processes[rank])
        return [f"the job has failed: {self._job.why}", *lines]
