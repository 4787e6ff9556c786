"""What a reader of the pages would trip over, and budgets: a part of `make lint`.

    python tools/lint_prose.py

Width of lines, words of all pages, lines of the core, and two tables of pages that list what the
code has. Prints what is wrong; the exit code is then 1. Needs nothing but Python and git.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_COLUMNS = 120
MOST_WORDS = 60_000  # pages, ADRs and changelog
MOST_LINES_OF_CORE = 23_000  # csrc without the plug-in for JAX, and what nvcc has written
MOST_LINES_OF_FILE = 500


def pages() -> list[Path]:
    """Return every committed page but those of results, which programs write."""
    listed = subprocess.check_output(["git", "ls-files", "*.md"], cwd=ROOT, text=True).split()
    paths = [ROOT / name for name in listed if not name.startswith("benchmarks/results/")]
    return [path for path in paths if path.exists()]


def widths() -> Iterator[str]:
    """Find lines that are too wide, except in tables."""
    for page in pages():
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
            if len(line) > MOST_COLUMNS and not line.startswith("|"):
                yield f"{page.relative_to(ROOT)}:{number}: more than {MOST_COLUMNS} columns"


def budgets() -> Iterator[str]:
    """Find what has grown too large."""
    words = sum(len(page.read_text("utf-8").split()) for page in pages())
    if words > MOST_WORDS:
        yield f"the pages have {words} words, at most {MOST_WORDS} are allowed"
    core = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".cc", ".h", ".inc"}]
    core = [p for p in core if p.relative_to(ROOT).parts[1] != "jax" and p.name != "kernels.inc"]
    lines = {path: len(path.read_text().splitlines()) for path in core}
    if sum(lines.values()) > MOST_LINES_OF_CORE:
        yield f"csrc has {sum(lines.values())} lines, at most {MOST_LINES_OF_CORE} are allowed"
    lines |= {path: len(path.read_text().splitlines()) for path in ROOT.glob("hororing/**/*.py")}
    for path, count in lines.items():
        if count > MOST_LINES_OF_FILE:
            yield f"{path.relative_to(ROOT)} has {count} lines, at most {MOST_LINES_OF_FILE}"


def counters() -> Iterator[str]:
    """Compare the table of counters with those of the core."""
    page = (ROOT / "docs/scheduling.md").read_text("utf-8").partition("## Statistics")[2]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page, re.MULTILINE)
    explained = {name for row in rows for name in re.findall(r"\w+", row)}
    header = (ROOT / "csrc/capi/hororing.h").read_text()
    struct = header.partition("typedef struct hr_stats {")[2].partition("} hr_stats;")[0]
    counted = re.findall(r"\w+", " ".join(re.findall(r"int64_t ([\w, ]+);", struct)))
    for name in explained ^ {*counted, "compression", "groups", "guard"}:
        yield f"docs/scheduling.md: counter {name} is in the table or in the code only"


def exceptions() -> Iterator[str]:
    """Compare the table of errors with the exceptions and texts of the code.

    Numbers, quoted names and dots stand for the variable parts of a text.
    """
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8").partition("\n## Errors\n")[2]
    table = re.match(r"\n(\|.*\n)+", page)
    rows = dict(re.findall(r"^\| `(\w+)`.*? \| .*? \| (.*) \| ", table[0] if table else "", re.M))
    parsed = ast.parse((ROOT / "hororing/errors.py").read_text())
    classes = {each.name for each in parsed.body if isinstance(each, ast.ClassDef)}
    for name in ({*rows} - {"ValueError"}) ^ classes:
        yield f"docs/troubleshooting.md: {name} is in the table or in hororing.errors only"
    sources = [*ROOT.glob("csrc/**/*.cc"), *ROOT.glob("hororing/**/*.py")]
    said = "".join(re.sub(r'"\s+f?"', "", each.read_text("utf-8")) for each in sources)
    for text in (text for row in rows.values() for text in re.findall("`(.*?)`", row)):
        for piece in re.split(r"'.*?'|\d+(?: s\b)?|\.\.\.", text):
            if piece.strip() not in said:
                yield f"docs/troubleshooting.md: no error says {piece.strip()!r}"


def seeded_faults() -> Iterator[str]:
    """Find faults of tests/mutants.py whose lines the code no longer has."""
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tests/mutants.py")
    assert spec is not None
    assert spec.loader is not None
    mutants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutants)
    for fault in mutants.FAULTS:
        if (ROOT / fault.file).read_text("utf-8").count(fault.old) != 1:
            yield f"tests/mutants.py: {fault.name}: {fault.file} no longer has its line once"


def main() -> int:
    """Print everything that is wrong; the result is the exit code."""
    checks = (widths, budgets, counters, exceptions, seeded_faults)
    found = [text for check in checks for text in check()]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
