"""The documentation's references exist: files, headings, names. `make lint` reads the prose."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
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


def defines(name: str) -> bool:
    """Whether `hororing.a.b.C` is a module, or its last part occurs in the module before it."""
    path = ROOT.joinpath(*name.split("."))
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    before, _, last = name.rpartition(".")
    module = ROOT.joinpath(*before.split("."))
    source = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    return source.exists() and bool(re.search(rf"\b{last}\b", source.read_text("utf-8")))


def test_names_are_those_of_the_code() -> None:
    named = {
        name
        for page in PAGES
        for name in re.findall(r'(?<![\w/."-])hororing(?:\.[A-Za-z]\w*)+', page.read_text("utf-8"))
    }
    assert len(named) > 20
    classes = {
        name: name.rpartition(".")[0] for name in named if re.search(r"\.[A-Z]\w*\.\w+$", name)
    }
    assert [name for name in sorted(named) if not defines(classes.get(name, name))] == []


def test_code_is_code_and_leaves_nothing_out() -> None:
    blocks = [
        (str(page.relative_to(ROOT)), textwrap.dedent(code))
        for page in PAGES
        for code in re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.S | re.M)
    ]
    assert len(blocks) > 20
    for page, code in blocks:
        assert not re.search(r"(^|:)\s*\.\.\.$", code, re.MULTILINE), f"{page}: ... in\n{code}"
        ast.parse(code, page)
