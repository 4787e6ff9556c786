"""Docstrings as numpydoc wants them: a part of `make lint`.

    python tools/lint_docstrings.py

In the sections Parameters, Attributes, Returns and Yields, a row is `name : type` on one line, and
prose stands below it. What is not a type (a sentence, half of one) is printed with its place; the
exit code is then 1. Needs nothing but Python.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRIVATE = re.compile(r"hororing/(?:_job/|_engine/|hororun/(?!function))")  # nobody else calls these
SECTIONS = ("Parameters", "Attributes", "Returns", "Yields", "Other Parameters")
WORDS = """
    int float bool str bytes complex object type None True False
    list lists tuple dict set frozenset sequence mapping iterable iterator generator
    callable function path file array array_like tensor pytree scalar module class
    optional of or and to by default same shape nested
"""
HEADING = re.compile(r"^( *)(\w[\w ]*)\n\1(-{3,})$", re.MULTILINE)


def is_type(text: str) -> bool:
    """Whether a text is a type: names, literals, and the few words between them."""
    text = re.sub(r"\"[^\"]*\"|'[^']*'|\{[^}]*\}|\[[^\]]*\]|\([^)]*\)", " ", text)
    words = re.findall(r"[^\s,|]+", text)
    return all(
        word in WORDS.split()
        or re.fullmatch(r"-?[\d.]+", word)
        or re.fullmatch(r"[A-Z]\w*|[a-zA-Z_]\w*(?:\.\w+)+", word)
        for word in words
    )


def sections(docstring: str) -> Iterator[tuple[str, list[str]]]:
    """Return each section of interest with its lines, without their common indentation."""
    found = list(HEADING.finditer(docstring))
    for match, after in itertools.zip_longest(found, found[1:]):
        if match[2] in SECTIONS:
            text = docstring[match.end() : after.start() if after else None]
            lines = [line.removeprefix(match[1]) for line in text.splitlines()]
            yield match[2], [line for line in lines if line.strip()]


def wrong(docstring: str) -> Iterator[str]:
    """Return what is wrong with the rows of a docstring."""
    for section, lines in sections(docstring):
        for number, line in enumerate(lines):
            if line.startswith(" "):
                continue
            name, colon, kind = line.partition(" : ")
            if not colon and section in ("Returns", "Yields"):
                name, kind = "", line
            if name and not re.fullmatch(r"\*{0,2}\w+(, (\*{0,2}\w+|\.{3}))*", name):
                yield f"{section}: {line!r} is no name"
            elif not is_type(kind):
                yield f"{section}: {name or 'result'}: {kind!r} is no type"
            elif not lines[number + 1 : number + 2] or not lines[number + 1].startswith(" "):
                yield f"{section}: {name or 'result'} has no text below it"


def main() -> int:
    """Print everything that is wrong; the result is the exit code."""
    count = 0
    for path in sorted(ROOT.glob("hororing/**/*.py")):
        if PRIVATE.match(str(path.relative_to(ROOT))):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef | ast.Module):
                for text in wrong(ast.get_docstring(node) or ""):
                    where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                    print(f"{where}: {getattr(node, 'name', 'module')}: {text}")
                    count += 1
    return bool(count)


if __name__ == "__main__":
    raise SystemExit(main())
