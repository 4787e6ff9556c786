"""The documentation's references exist (files, headings, names, counters), and its lines fit."""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
from pathlib import Path

from hororing import errors
from hororing._core import ffi

ROOT = Path(__file__).parents[2]
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


def test_no_line_but_those_of_tables_is_wider_than_120_columns() -> None:
    wide = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in PAGES
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1)
        if len(line) > 120 and not line.startswith("|")
    ]
    assert wide == []


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
        for name in re.findall(r"(?<![\w/.-])hororing(?:\.[A-Za-z]\w*)+", page.read_text("utf-8"))
    }
    assert len(named) > 20
    classes = {
        name: name.rpartition(".")[0] for name in named if re.search(r"\.[A-Z]\w*\.\w+$", name)
    }
    assert [name for name in sorted(named) if not defines(classes.get(name, name))] == []


def test_the_walk_of_a_gradient_passes_through_functions_that_are_there() -> None:
    """If this fails, `make walk` regenerates docs/walk.md."""
    rows = re.findall(r"^\| `(.*?)` \| (.*) \|$", (ROOT / "docs/walk.md").read_text("utf-8"), re.M)
    gone = [
        f"{file}: {name}"
        for file, names in rows
        for name in re.findall("`(.*?)`", names)
        if not (ROOT / file).exists()
        or not re.search(rf"\b{re.split('::|[.]', name)[-1]}\b", (ROOT / file).read_text("utf-8"))
    ]
    assert len(rows) > 50
    assert gone == []


def test_seeded_faults_are_current_and_listed() -> None:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tests/mutants.py")
    assert spec is not None
    assert spec.loader is not None
    mutants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutants)
    page = (ROOT / "docs/testing.md").read_text("utf-8")
    for fault in mutants.FAULTS:
        assert (ROOT / fault.file).read_text("utf-8").count(fault.old) == 1, fault.name
        assert f"* {fault.name} (`{fault.file}`):" in page, fault.name


def test_every_counter_is_explained() -> None:
    page = (ROOT / "docs/scheduling.md").read_text("utf-8")
    rows = re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \|", page.partition("## Statistics")[2], re.MULTILINE
    )
    explained = [name for row in rows for name in re.findall(r"\w+", row)]
    assert sorted(explained) == sorted([*dir(ffi.new("hr_stats *")), "compression", "groups"])


def test_every_exception_is_in_the_table_with_words_of_its_text() -> None:
    """Numbers, quoted names and dots stand for the variable parts of a text."""
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8").partition("\n## Errors\n")[2]
    table = re.match(r"\n(\|.*\n)+", page)
    assert table
    rows = dict(re.findall(r"^\| `(\w+)`.*? \| .*? \| (.*) \| ", table[0], re.MULTILINE))
    of_module = vars(errors).items()
    classes = {
        name for name, each in of_module if getattr(each, "__module__", "") == errors.__name__
    }
    classes -= {"HorovodInternalError", "error_for"}
    assert {*rows} - {"ValueError"} == classes
    sources = [*ROOT.glob("csrc/**/*.cc"), *ROOT.glob("hororing/**/*.py")]
    said = "".join(re.sub(r'"\s+f?"', "", each.read_text("utf-8")) for each in sources)
    texts = [text for row in rows.values() for text in re.findall("`(.*?)`", row)]
    assert len(texts) > 9
    pieces = [
        piece.strip() for text in texts for piece in re.split(r"'.*?'|\d+(?: s\b)?|\.\.\.", text)
    ]
    assert [piece for piece in pieces if piece not in said] == []


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
