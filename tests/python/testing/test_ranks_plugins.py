"""Tests on ranks under other plug-ins of pytest, and its debugger."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiers

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:hypothesispytest", "--rootdir=."]

DEBUGGED = """
import numpy as np, pytest
import hororing.numpy as hvd

@pytest.mark.ranks(2, limit_s=0.5)
def test_breakpoint():
    here = 20
    breakpoint()  # one rank stops, longer than the limit
    assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == 2

@pytest.mark.ranks(2)
def test_fails():
    value = 40 + hvd.rank()
    assert value == 40
    hvd.barrier()

@pytest.mark.ranks(2)
def test_after_the_end(): ...
"""


def run(folder: Path, text: str, *options: str, typed: str = "") -> str:
    (folder / "test_it.py").write_text(text)
    ended = subprocess.run(
        [*PYTEST, *options], cwd=folder, input=typed, capture_output=True, text=True, timeout=200
    )
    return ended.stdout


def test_the_debugger_stops_one_rank(tmp_path: Path):
    typed = "import time; time.sleep(1)\nnext\np here + 3\ncontinue\n"
    printed = run(tmp_path, DEBUGGED, "-k", "breakpoint", typed=typed)
    assert len(re.findall("^>>> rank [01] stops here", printed, re.MULTILINE)) == 1, printed
    assert "-> assert hvd.allreduce" in printed
    assert "(Pdb) 23" in printed
    assert "1 passed" in printed


def test_pdb_shows_the_rank_that_failed(tmp_path: Path):
    printed = run(tmp_path, DEBUGGED, "--pdb", "-k", "not breakpoint", typed="p value\nquit\n")
    assert ">>> rank 1 stops here" in printed, printed
    assert "(Pdb) 41" in printed
    assert "1 failed" in printed
    assert "Exit: Quitting debugger" in printed
    assert "1 passed" not in printed


MEASURED = """
import pytest
import hororing.numpy as hvd, hororing.testing

def by_rank(rank):
    if rank == 0:
        return "zero"
    elif rank == 1:
        return "one"
    return "never"  # line 10

def in_run():
    return hvd.rank()

@pytest.mark.ranks(2)
def test_ranks():
    hororing.testing.kill(rank=1, at="barrier:1")
    assert by_rank(hvd.rank())
    with hororing.testing.raises_on(0, hororing.errors.PeerLostError):
        hvd.barrier()

def test_run():
    assert hororing.testing.run(in_run, ranks=2) == [0, 1]
"""


@pytest.mark.parametrize("workers", tiers.choose([0, 2], push=[0]))
def test_coverage_of_ranks_counts(workers: int, tmp_path: Path):
    pytest.importorskip("pytest_cov")
    options = ["--cov=test_it", "--cov-report=term-missing", "-n", str(workers)]
    printed = run(tmp_path, MEASURED, *options)
    assert "2 passed" in printed, printed
    assert re.search(r"test_it.py +\d+ +1 +\d+% +10\n", printed), printed


@tiers.full
def test_pytest_timeout_ends_a_rank(tmp_path: Path):
    text = """
import time, pytest, hororing.numpy as hvd
@pytest.mark.ranks(2)
@pytest.mark.timeout(0.5)
def test_slow():
    time.sleep(100 * hvd.rank())
"""
    printed = run(tmp_path, text)
    assert "rank 1 failed: Failed: Timeout" in printed, printed
