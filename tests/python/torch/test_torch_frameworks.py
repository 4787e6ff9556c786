"""Frameworks on torch.distributed, over hororing: their examples train, with every launcher.

Full tier, 10 to 20 s for each of 10 tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import mpirun
import pytest
import tiers

pytestmark = tiers.full

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MPIRUN = ["mpirun", "-np", "2", sys.executable]
HORORUN = [sys.executable, "-m", "hororing.hororun", "-np", "2", "--no-tag-output", sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]


def output(command: Sequence[str | Path], folder: Path) -> str:
    environment = {**os.environ, **mpirun.launch_environment(str(folder))}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_accuracy(printed: str, last_words: str, least: float = 0.96) -> None:
    """Fail unless only rank 0 has printed the accuracy of two ranks, and it is high enough."""
    ((accuracy, words),) = re.findall(r"^test accuracy (\S+) (.*)$", printed, re.MULTILINE)
    assert words.endswith(last_words), printed
    assert float(accuracy) >= least, printed


@pytest.mark.parametrize(
    ("start", "parallel"), [(MPIRUN, "ddp"), (HORORUN, "zero"), (TORCHRUN, "fsdp")]
)
def test_torch_alone(start: list[str], parallel: str, tmp_path: Path) -> None:
    script = EXAMPLES / "torch_distributed_digits.py"
    printed = output([*start, script, "--parallel", parallel], tmp_path)
    check_accuracy(printed, f"of {parallel} on 2 ranks")


@pytest.mark.parametrize("start", ["torchrun", "mpirun"])
def test_accelerate_launch(start: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    # Accelerate runs torchrun for several GPUs, and mpirun with a hostfile.
    options = {
        "torchrun": ["--multi_gpu", "--main_process_port", "0"],
        "mpirun": ["--cpu", "--mpirun_hostfile", str(hosts)],
    }
    printed = output([*ACCELERATE, *options[start], EXAMPLES / "accelerate_digits.py"], tmp_path)
    check_accuracy(printed, "of 359 images on 2 ranks by hororing")


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    printed = output([*TORCHRUN, EXAMPLES / "trainer_digits.py"], tmp_path)
    check_accuracy(printed, "of 359 images on 2 ranks by hororing")


@pytest.mark.parametrize("start", [[sys.executable], HORORUN, TORCHRUN])
def test_lightning(start: list[str], tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    printed = output([*start, EXAMPLES / "lightning_digits.py"], tmp_path)
    check_accuracy(printed, "on 2 ranks by hororing")


METRICS = """
import os, torch, torch.distributed as dist
from torchmetrics import MeanMetric, PearsonCorrCoef
from torchmetrics.classification import BinaryAUROC

dist.init_process_group("hororing")
rank = dist.get_rank()
scores = torch.rand(50, generator=torch.Generator().manual_seed(1))
labels = (scores + torch.linspace(0, 1, 50) > 1).int()
# Rank 0 has 20 of the samples, rank 1 has 30.
mine = slice(0, 20) if rank == 0 else slice(20, 50)

def value(metric, *all_samples):
    alone = type(metric)(sync_on_compute=False)
    alone.update(*all_samples)
    metric.update(*(samples[mine] for samples in all_samples))
    torch.testing.assert_close(metric.compute(), alone.compute())

value(MeanMetric(), scores)                      # sums
value(PearsonCorrCoef(), scores, labels.float())  # states that are combined by a function
value(BinaryAUROC(), scores, labels)             # lists of samples, which differ in length
dist.destroy_process_group()
os.write(1, f"rank {rank} is done\\n".encode())  # in one write: ranks share stdout
"""


def test_torchmetrics(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    script = tmp_path / "metrics.py"
    script.write_text(METRICS)
    printed = output([*TORCHRUN, script], tmp_path)
    assert sorted(printed.splitlines()) == ["rank 0 is done", "rank 1 is done"]
