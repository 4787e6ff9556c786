"""A few steps of the examples of hierarchical SGD."""

from __future__ import annotations

import re
from pathlib import Path

import mpirun
import pytest
import tiers

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LAST_LINE = r"^saved -?\d+% of the time in (\d+) steps on (\d+) ranks$"


def run(name: str, *args: str, **environment: str) -> str:
    job = mpirun.run(EXAMPLES / name, 2, *args, timeout_s=110, environment=environment)
    assert job.returncode == 0, job.report()
    assert "saved" not in job.outputs[1], job.report()
    assert re.findall(LAST_LINE, job.outputs[0], re.MULTILINE) == [(args[1], "2")], job.report()
    return job.outputs[0]


@tiers.full
def test_torch_trains_saves_and_resumes():
    options = ("--pair", "1", "--compute", "0", "--delay", "0.001")
    output = run("hierarchical_sgd_digits.py", "--steps", "60", "--resume-at", "31", *options)
    ((plain, ours),) = re.findall(r"^test accuracy (\S+) and (\S+)$", output, re.MULTILINE)
    assert min(float(plain), float(ours)) > 0.8, output


@tiers.full
def test_keras_trains():
    pytest.importorskip("keras")
    run(
        "hierarchical_sgd_digits_keras.py", "--steps", "12", "--pair", "1", "--delay", "0.001",
        "--warmup-steps", "2", KERAS_BACKEND="torch",
    )  # fmt: skip
