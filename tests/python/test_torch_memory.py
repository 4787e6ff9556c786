"""What training takes of memory beyond the gradients: bucket views, copies, and DDP's two ways.

Each in jobs of its own, as a whole: importing, initialising, wrapping.
"""

from __future__ import annotations

import functools
import json
import statistics
from pathlib import Path

import mpirun
import pytest
from test_memory import GIVE_BACK

SCRIPT = Path(__file__).parents[2] / "benchmarks/gradient_memory.py"
# 6.1 were measured: Python's modules 3.4, MPI's own 2.7. DDP, which torch has imported, has 0.0.
CONSTANT_MIB = 9


@functools.cache
def told(way: str) -> dict[str, float]:
    """On average of the ranks: pages of one rank's arena may count for another that reads them."""
    job = mpirun.run(
        SCRIPT, 2, way, environment={"PYTHONPATH": str(SCRIPT.parent), **GIVE_BACK}
    )  # fmt: skip
    assert job.returncode == 0, job.report()
    of_ranks = [json.loads(text.splitlines()[-1]) for text in job.outputs]
    return {key: statistics.mean(each[key] for each in of_ranks) for key in of_ranks[0]}


def beyond_constant(way: str) -> float:
    return told(way)["total_MiB"] - told(way)["constant_MiB"]


def test_ddp_holds_its_buckets_beside_the_gradients() -> None:
    """Or nothing is measured."""
    assert beyond_constant("ddp") > 0.8 * told("ddp")["gradients_MiB"], told("ddp")


@pytest.mark.parametrize("way", ["views", "copies"])
def test_training_takes_less_than_with_ddp(way: str) -> None:
    assert told(way)["total_MiB"] <= told("ddp")["total_MiB"], (told(way), told("ddp"))


def test_views_take_no_more_than_those_of_ddp_but_for_a_constant() -> None:
    views, ddp = told("views"), told("ddp-views")
    # A MiB is how finely Python and malloc take memory.
    assert beyond_constant("views") <= beyond_constant("ddp-views") + 1, (views, ddp)
    assert views["constant_MiB"] <= CONSTANT_MIB, views
    assert views["total_MiB"] <= ddp["total_MiB"] + CONSTANT_MIB, (views, ddp)
