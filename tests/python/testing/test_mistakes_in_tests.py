"""Each mistake in support/mistakes_in_tests.py is reported with the right rank and line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import mistakes_in_tests as mistakes
import pytest

FILE = Path(mistakes.__file__)
TEXT = FILE.read_text().splitlines()


def lines_of(name: str) -> list[int]:
    """The lines of a mistake: in the function, or marked with its name."""
    found = [at for at, line in enumerate(TEXT, 1) if line.endswith(f"# here of {name}")]
    begin = next(at for at, line in enumerate(TEXT) if line.strip().startswith(f"def {name}(")) + 1
    for at in range(begin, len(TEXT)):
        if TEXT[at].startswith(("def ", "@", "#")):
            break
        if TEXT[at].endswith("# here"):
            found.append(at + 1)
    return found


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What pytest says about each mistake; all of them run in one session."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "test_of_users.py").write_text(FILE.read_text())
    options = ["-p", "no:hypothesispytest", "-p", "no:cacheprovider", "-q", "--junitxml=all.xml"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_of_users.py"],
        cwd=folder, capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert ended.returncode == 1, ended.stdout + ended.stderr
    found: dict[str, str] = {}
    for case in ET.parse(folder / "all.xml").iter("testcase"):
        for kind in ("failure", "error"):
            for each in case.iter(kind):
                text = f"{each.get('message')}\n{each.text}"
                name = case.get("name", "").partition(" ")[0]  # without that of a subtest
                found[name] = found.get(name, "") + text
    return found


def test_there_are_thirty_mistakes():
    assert len(mistakes.BLAME) >= 30


@pytest.mark.parametrize("name", mistakes.BLAME)
def test_a_mistake_is_reported_with_its_rank_and_line(name: str, reported: dict[str, str]):
    who, text = mistakes.BLAME[name]
    report = reported[name]
    assert text in report, report
    head = report.partition("\n\n")[0]
    assert re.search(rf"\b{who}\b", report if who == "every rank" else head), report
    for line in lines_of(name):
        assert re.search(rf"test_of_users\.py(:|\", line ){line}\b|at line {line}\b", report), (
            report
        )
