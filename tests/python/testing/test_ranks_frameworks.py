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
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_a_framework(framework: str, tmp_path: Path):
    pytest.importorskip(framework)
    file = ROOT / "tests/python/support" / f"{framework}_on_ranks.py"
    (tmp_path / "test_ranks.py").write_text(file.read_text())
    passed(tmp_path)
