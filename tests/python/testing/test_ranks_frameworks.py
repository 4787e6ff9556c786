"""Tests on ranks with frameworks, each in a pytest of its own; and the example project.

Otherwise every process of pytest-xdist that runs tests on ranks would import all frameworks.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiers

ROOT = Path(__file__).parents[3]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:hypothesispytest", "--rootdir=."]


def passed(folder: Path) -> str:
    ended = subprocess.run(
        PYTEST, cwd=folder, capture_output=True, text=True, timeout=230, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_the_example_project(tmp_path: Path):
    folder = tmp_path / "project"
    shutil.copytree(ROOT / "examples/tests_on_ranks", folder)
    assert "8 passed" in passed(folder)


@tiers.full
@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax"])
def test_a_framework(framework: str, tmp_path: Path):
    pytest.importorskip(framework)
    file = ROOT / "tests/python/support" / f"{framework}_on_ranks.py"
    (tmp_path / "test_ranks.py").write_text(file.read_text())
    passed(tmp_path)


THREADS = """
import os, threading, time, pytest
import hororing.numpy as hvd

threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()

@pytest.mark.ranks(2)
def test_each_rank_has_the_thread():
    assert len({*hvd.allgather_object(os.getppid())}) == 1  # that of the tests, not forked
    assert threading.active_count() > 2

@pytest.mark.ranks(2)
def test_a_rank_dies():
    if hvd.rank():
        os._exit(3)
    hvd.barrier()

@pytest.mark.ranks(2)
def test_there_are_new_ranks():
    hvd.barrier()
"""


@tiers.full
@pytest.mark.parametrize("capture", ["no", "sys"])
def test_files_that_start_threads_are_imported_by_each_rank(capture: str, tmp_path: Path):
    (tmp_path / "test_threads.py").write_text(THREADS)
    ended = subprocess.run(
        [*PYTEST, f"--capture={capture}"], cwd=tmp_path, capture_output=True, text=True,
        timeout=230, check=False,
    )  # fmt: skip
    assert "1 failed, 2 passed" in ended.stdout, ended.stdout + ended.stderr
    line = THREADS.splitlines().index("        os._exit(3)") + 1
    assert f"rank 1 ended its process with code 3 in call at test_threads.py:{line}" in ended.stdout


@tiers.full
@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("ranks_backend=nccl", "ranks_backend = nccl: there are hororing, gloo"),
        ("ranks_limit_s=5s", "ranks_limit_s = 5s: not a number"),
    ],
)
def test_wrong_settings_are_named(setting: str, text: str, tmp_path: Path):
    test = "import pytest\n@pytest.mark.ranks(2)\ndef test_nothing(): pass\n"
    (tmp_path / "test_settings.py").write_text(test)
    ended = subprocess.run(
        [*PYTEST, "-o", setting], cwd=tmp_path, capture_output=True, text=True, timeout=230,
        check=False,
    )  # fmt: skip
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert text in ended.stderr + ended.stdout
