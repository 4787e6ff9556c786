"""Trials under Ray Tune, on the two nodes of a local cluster. Full tier, a minute; needs Ray."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiers

ROOT = Path(__file__).parents[3]
FOUND = importlib.util.find_spec("ray") is not None and importlib.util.find_spec("pandas")

SCRIPT = """
import sys

import numpy as np
import ray
from ray.cluster_utils import Cluster

import hororing.ray
from hororing.toolkit.search import Range

def train(trial):
    import hororing.numpy as hvd

    weight = np.array([5.0]) if trial.state is None else trial.state
    for step in range(trial.first_step, 4):
        weight = weight * (1 - trial.params["lr"])
        weight = hvd.allreduce(weight, name="weight", process_set=trial.process_set)
        if trial.number == 1 and step == 1 and hvd.rank() == 1:
            raise ValueError("no such layer")
        trial.report(step, float(weight[0]), state=weight)

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
cluster.add_node(num_cpus=2)
ray.init(address=cluster.address, log_to_driver=False)
space = {"lr": Range(1e-3, 0.5, log=True), "kind": ["a", "b"]}
for scheduler in ("asha", "pbt"):
    found = hororing.ray.search(
        space, train, trials=3, ranks_per_trial=2, scheduler=scheduler, seed=1,
        storage_path=sys.argv[1], timeout_s=60,
    )
    assert len(found) == 3
    (failed,) = found.errors
    assert "no such layer" in str(failed), failed
    best = found.get_best_result()
    assert best.metrics["step"] == 3, best.metrics
    rate, value = best.config["lr"], best.metrics["value"]
    if scheduler == "asha":
        assert abs(value - 5 * (1 - rate) ** 4) < 1e-9, best
    assert best.config["kind"] in ("a", "b")
ray.shutdown()
cluster.shutdown()
"""


@tiers.full
@pytest.mark.timeout(560)
@pytest.mark.skipif(not FOUND, reason="Ray Tune is missing: pip install 'ray[tune]'")
def test_trials_of_two_ranks_run_beside_each_other_and_fail_alone(tmp_path: Path):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "RAY_AUTH_MODE": "disabled"},
        check=True,
        timeout=540,
    )
