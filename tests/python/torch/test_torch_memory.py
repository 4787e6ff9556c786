"""Memory of training beyond the gradients, against DDP.

Each has its own jobs, from import and initialization to training.
"""

from __future__ import annotations

import functools
import json
import statistics
from pathlib import Path

import mpirun
import tiers
from mpirun import GIVE_BACK

SCRIPT = Path(__file__).parents[3] / "benchmarks/gradient_memory.py"


@functools.cache
def told(way: str) -> dict[str, float]:
    """Return the averages over the ranks."""
    job = mpirun.run(
        SCRIPT, 2, way, environment={"PYTHONPATH": str(SCRIPT.parent), **GIVE_BACK}
    )  # fmt: skip
    assert job.returncode == 0, job.report()
    of_ranks = [json.loads(text.splitlines()[-1]) for text in job.outputs]
    return {key: statistics.mean(each[key] for each in of_ranks) for key in of_ranks[0]}


@tiers.full
def test_ddp_holds_its_buckets_beside_the_gradients() -> None:
    """This shows that the measurement works."""
    ddp = told("ddp")
    assert ddp["total_MiB"] - ddp["constant_MiB"] > 0.8 * ddp["gradients_MiB"], ddp


@tiers.full
def test_training_takes_less_than_with_ddp() -> None:
    ours, ddp = told("hororing"), told("ddp")
    assert ours["total_MiB"] <= ddp["total_MiB"], (ours, ddp)
