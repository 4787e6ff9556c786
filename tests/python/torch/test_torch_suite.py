"""The distributed tests that PyTorch ships, over hororing: at least what gloo passes.

Full tier, 8 min for both backends on 3 ranks. docs/torch_distributed.md has the counts. For other
numbers of ranks, and for single tests, run torch_suite.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiers

pytest.importorskip("expecttest", reason="PyTorch's tests need it")


def results(backend: str, *arguments: str) -> dict[str, dict[str, str]]:
    """Return the outcome of each test."""
    suite = Path(__file__).parents[1] / "support/torch_suite.py"
    done = subprocess.run(
        [sys.executable, suite, "--backend", backend, *arguments],
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert rows, done.stderr
    return {row["name"]: row for row in rows}


@tiers.full
@pytest.mark.timeout(2500)
@pytest.mark.parametrize("arguments", [(), ("--as", "mpi", "--words", "all_to_all")])
def test_hororing_passes_what_gloo_passes(arguments: tuple[str, ...]) -> None:
    gloo, ours = results("gloo", *arguments), results("hororing", *arguments)
    passed = {name for name, row in gloo.items() if row["outcome"] == "passed"}
    assert len(passed) > (80 if not arguments else 3)
    for name, row in ours.items():
        assert row["outcome"] != "failed", row
        assert row["outcome"] == "passed" or name not in passed, row
