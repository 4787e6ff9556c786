"""The full runs of the examples on digits: records become rows, rows become tables and plots."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hororing.toolkit.tracking import RunRecord

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import digits  # noqa: E402
import digits_show  # noqa: E402


def hierarchical_rows(folder: Path) -> list[digits.Row]:
    """Return rows of two methods and two seeds; the second seed is half a second slower."""
    rows = []
    for seed in (1, 2):
        records = folder / str(seed)
        for way, seconds in (("synchronous", 4.0), ("local", 2.0)):
            with RunRecord(records, {"way": way, "seed": seed}) as run:
                for step in (8, 16):
                    late = seconds * step / 16 + (seed - 1) / 2
                    run.log(step, {"loss": 1 / step, "accuracy": 0.5, "seconds": late})
        head = {"title": digits.HIERARCHICAL, "framework": "torch", "command": f"x --seed {seed}"}
        rows += digits.rows_of(records, **head, wall_s=7.0, busy_share_before=0.0)
    return rows


def test_tables_have_means_ranges_and_speed_ups_of_the_same_seed(tmp_path: Path):
    lines = digits_show.table(hierarchical_rows(tmp_path), timed=True)
    loss, accuracy = "0.062 (0.062-0.062)", "50.0 (50.0-50.0)"
    same = f"| 1 | 2 | 16 (16-16) | {loss} | {accuracy}"
    assert f"| torch | synchronous {same} | 4.2 (4.0-4.5) | 1.00 (1.00-1.00) |" in lines
    assert f"| torch | local {same} | 2.2 (2.0-2.5) | 1.90 (1.80-2.00) |" in lines


def test_a_run_that_did_not_end_is_an_error(tmp_path: Path):
    run = RunRecord(tmp_path, {"way": "local", "seed": 1})
    run.log(8, {"loss": 1.0})
    with pytest.raises(ValueError, match="is unfinished"):
        digits.rows_of(tmp_path)
    run.close()


def test_commands_are_those_of_the_examples():
    examples = {f"examples/{path.name}" for path in (BENCHMARKS.parent / "examples").iterdir()}
    for _, _, command in digits.commands(3):
        assert examples & set(command.split())
        assert command.endswith(" --seed 3")


def test_committed_results_are_complete_and_become_pages_and_plots(tmp_path: Path):
    text = (digits.RESULTS / "digits.json").read_text()
    rows = json.loads(text)["rows"]
    made = {row["command"] for row in rows}
    assert made >= {command for _, _, command in digits.commands(1)}
    assert made <= {command for seed in (1, 2, 3) for _, _, command in digits.commands(seed)}
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    (tmp_path / "digits.json").write_text(text)
    digits.main(["show", "--out", str(tmp_path)])
    assert (tmp_path / "digits.md").read_text() == (digits.RESULTS / "digits.md").read_text()
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {"digits-large-batch.png", "digits-hierarchical.png"}
