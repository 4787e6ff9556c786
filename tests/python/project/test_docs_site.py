"""The documentation site builds without a warning. Full tier, 30 s, mostly for imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiers import full

ROOT = Path(__file__).parents[3]


@full
def test_the_site_builds_without_a_warning_and_has_the_public_names(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="make docs-site installs it")
    pytest.importorskip("material")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    page = (tmp_path / "api/torch.html").read_text("utf-8")
    assert "<blockquote>" not in page  # examples are code
    for name in ("DistributedOptimizer", "allreduce_async_", "elastic.TorchState"):
        assert f'id="hororing.torch.{name}"' in page
    assert "files/examples/elastic_torch.py.html" in (tmp_path / "elastic.html").read_text("utf-8")
