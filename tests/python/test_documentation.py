"""Links of the documentation lead to files and headings that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        links = re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)]*))?\)", page.read_text("utf-8"))
        for file, anchor in links:
            target = page.parent / file if file else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {file}#{anchor}")
    assert len(PAGES) > 10
    assert broken == []
