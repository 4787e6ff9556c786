"""The documentation site builds without a warning, and answers. Full tier, 30 s: mostly imports.

`make docs-site` installs what it needs; the questions also need node.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import full

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.timeout(700)  # the site needs two minutes on a busy machine

# What readers type, and the page that must come first.
QUESTIONS = {
    "gradient clipping": "pytorch.html#gradient-clipping",
    "checkpoint": "pytorch.html#save-a-checkpoint",
    "DataLoader": "pytorch.html#load-data-in-worker-processes",
    "mixed precision": "pytorch.html#mixed-precision",
    "stop a job": "launching.html#stop-a-job",
    "which rank is slow": "stragglers.html",
    "kubernetes": "clusters.html#kubernetes",
    "containers": "clusters.html",
    "jax": "jax.html",
    "nan": "guard.html",
    "slow network": "compression.html",
    "timeline": "timeline.html",
    "progress": "watching.html",
    "supported versions": "installing.html#supported-versions",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("mkdocstrings", "material"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: make docs-site")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


@full
def test_the_site_has_the_public_names(site: Path) -> None:
    page = (site / "api/torch.html").read_text("utf-8")
    assert "<blockquote>" not in page  # examples are code
    for name in ("DistributedOptimizer", "allreduce_async_", "elastic.TorchState"):
        assert page.count(f'id="hororing.torch.{name}"') == 1
    assert page.index('id="training"') < page.index('id="collectives"')
    assert '<span class="n">Average</span>' in page  # not op: int = 0


@full
def test_the_first_page_has_cards(site: Path) -> None:
    page = (site / "index.html").read_text("utf-8")
    cards = page.partition('<div class="grid cards"')[2]
    assert cards.count("<summary>Complete, in") == len(
        [*ROOT.glob("examples/first/*.py"), *ROOT.glob("examples/first/*.sh")]
    )
    assert "I have a script for DDP" in cards
    assert 'href="files/' not in cards


@full
def test_sources_are_shown_as_they_are(site: Path) -> None:
    page = (site / "files/examples/torch_imagenet.py.html").read_text("utf-8")
    assert "classes.md" not in page
    assert "files/examples/elastic_torch.py.html" in (site / "elastic.html").read_text("utf-8")


@full
def test_machines_find_the_markdown(site: Path) -> None:
    assert "[Tutorial: your script on two processes](tutorial.md)" in (site / "llms.txt").read_text(
        "utf-8"
    )
    assert (site / "tutorial.md").read_text("utf-8").startswith("# Tutorial")


@full
def test_the_search_leads_to_the_page_for_users(site: Path) -> None:
    if not (node := shutil.which("node")):
        pytest.skip("node is not installed")
    index = site / "search/search_index.json"
    places = {each["location"].partition("#")[0] for each in json.loads(index.read_text())["docs"]}
    assert not [each for each in places if each.startswith(("adr/", "files/", "threading"))]
    worker = next(site.glob("assets/javascripts/workers/search*.js"))
    script = ROOT / "tests/python/support/ask_site.js"
    answer = subprocess.check_output([node, script, worker, index, *QUESTIONS], text=True)
    first = {question: found[0] for question, found in json.loads(answer).items()}
    wrong = {q: first[q] for q, place in QUESTIONS.items() if not first[q].startswith(place)}
    assert wrong == {}
