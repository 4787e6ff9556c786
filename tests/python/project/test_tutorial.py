"""docs/tutorial.md, followed word by word: its script, its changes, its commands.

Push tier: the changes fit. Full tier, 30 s: one rank, two, three from a checkpoint, three elastic.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiers

PAGE = (Path(__file__).parents[3] / "docs/tutorial.md").read_text("utf-8")


def scripts() -> list[str]:
    """Return the script after each step that changes it."""
    parts = re.split(r"^## \d\. ", PAGE, flags=re.M)[1:]
    found = []
    script = ""
    for part in parts:
        for kind, code in re.findall(r"^```(python|diff)\n(.*?)^```$", part, re.S | re.M):
            if kind == "diff":
                lines = code.splitlines()
                before = "\n".join(line[1:] for line in lines if line[0] in " -")
                after = "\n".join(line[1:] for line in lines if line[0] in " +")
                assert script.count(before) == 1, before
                script = script.replace(before, after)
            else:
                script = script.partition("first = 0\n")[0] + code
        found.append(script)
    return found


def test_each_change_fits_the_script_before_it() -> None:
    one, two, timeline, resumed, elastic = scripts()
    assert "hvd" not in one
    assert two == timeline
    for script in (one, two, resumed, elastic):
        compile(script, "train.py", "exec")


@tiers.full
def test_the_steps_train(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")

    def run(step: int, *launcher: str) -> str:
        (tmp_path / "train.py").write_text(scripts()[step])
        command = [*launcher, sys.executable, "train.py"]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def right(output: str) -> float:
        return float(output.splitlines()[-1].split()[-2])

    hororun = [sys.executable, "-m", "hororing.hororun"]
    assert right(run(0)) > 0.95
    (tmp_path / "last.pt").unlink()
    assert right(run(1, *hororun, "-np", "2")) > 0.9
    resumed = run(3, *hororun, "-np", "3")
    assert "epoch 5:" in resumed
    assert right(resumed) > 0.97
    assert "epoch 19: loss" in run(4, *hororun, "-np", "3", "--min-np", "2")
