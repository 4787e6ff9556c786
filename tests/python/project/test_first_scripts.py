"""The scripts of the first page's cards (examples/first) are short, shown, and run as they are.

Full tier: 40 s.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiers

ROOT = Path(__file__).parents[3]
FIRST = ROOT / "examples" / "first"
NAMES = sorted(path.name for path in FIRST.iterdir() if path.suffix in {".py", ".sh"})
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run(*words: str, folder: Path = FIRST) -> str:
    done = subprocess.run(
        words, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_has_a_card_and_at_most_20_lines():
    table = (ROOT / "README.md").read_text("utf-8").partition("| I have |")[2]
    assert set(re.findall(r"examples/first/([\w.]+)\)", table)) == set(NAMES)
    for name in NAMES:
        text = (FIRST / name).read_text("utf-8")
        assert sum(map(bool, text.splitlines())) <= 20, name


@tiers.full
@pytest.mark.parametrize(
    "name", [n for n in NAMES if n.endswith("_script.py")] + ["slow_network.py"]
)
def test_it_runs_as_its_first_line_says(name: str):
    pytest.importorskip("jax" if "jax" in name else "torch")
    command = re.search(r": (\w+ .*)\"\"\"", (FIRST / name).read_text("utf-8"))
    assert command is not None
    said = run(*command[1].split())
    losses = [float(each) for each in re.findall(r"rank \d of 2: loss ([\d.]+)", said)]
    assert len(losses) == 2
    assert max(losses) < 0.4  # 1.0 and more at first


@tiers.full
def test_the_test_of_ranks_passes(tmp_path: Path):
    pytest.importorskip("torch")
    shutil.copy(FIRST / "test_ranks.py", tmp_path)
    words = ["-q", "-p", "no:cacheprovider", "-o", "ranks_limit_s=60", "test_ranks.py"]
    assert "1 passed" in run(sys.executable, "-m", "pytest", *words, folder=tmp_path)


@tiers.full
def test_the_others_go_on_when_a_process_is_killed():
    pytest.importorskip("torch")
    words = ["hororun", "-np", "3", "--min-np", "2", "python", "machines_vanish.py"]
    with subprocess.Popen(
        words, cwd=FIRST, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if found := re.fullmatch(r"\[1\] step 9 on 3 ranks; try kill -9 (\d+)\n", line):
                os.kill(int(found[1]), signal.SIGKILL)
        assert job.stderr is not None
        told = job.stderr.read()
    assert job.returncode == 0, told
    assert re.search(r"\(rank 1\) was killed by SIGKILL; generation 2 with 2 ranks trains on", told)


@tiers.full
@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".sh")])
def test_the_commands_of_a_script_exist(name: str):
    run("sh", "-n", name)
    for words in re.findall(r"^(hororun|hororing \w+)", (FIRST / name).read_text("utf-8"), re.M):
        assert "usage: " in run(*words.split(), "--help")
