"""The timeline opens in a real viewer: catapult's, in headless Chromium."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mpirun
import pytest
import tiers
from timeline_ranks import LAYERS, STEPS
from timeline_viewer import Model, ViewerMissingError, open_timeline, screenshot

pytestmark = tiers.full


def open_or_skip(path: Path) -> Model:
    try:
        return open_timeline(path)
    except ViewerMissingError as missing:
        pytest.skip(str(missing))


def sample(ranks: int, first_pid: int = 1) -> list[dict]:
    """Return records like those of csrc/trace/writer.cc: ten allreduces on every rank."""
    records: list[dict] = []
    for rank in range(ranks):
        pid, tid = rank + first_pid, 16 * rank + first_pid
        records.append(
            {
                "name": "process_name",
                "ph": "M",
                "pid": pid,
                "tid": tid,
                "args": {"name": f"rank {rank} (host)"},
            }
        )
        for offset, name in enumerate(["caller", "engine", "negotiation"]):
            args = {"name": name}
            records.append(
                {
                    "name": "thread_name",
                    "ph": "M",
                    "pid": pid,
                    "tid": tid + offset,
                    "args": args,
                }
            )
        for i in range(10):
            at = 1000.5 * i + 0.25 * rank
            args = {"tensor": 'layer.weight "</script>"', "bytes": 4096}
            common = {"pid": pid, "args": args}

            def span(name: str, row: int, begin: float, micros: float, common=common) -> None:
                records.append(
                    {
                        "name": name,
                        "ph": "X",
                        "ts": begin,
                        "dur": micros,
                        **common,
                        "tid": row,
                    }
                )

            span("SUBMIT", tid, at, 5.125)
            name, identity = "NEGOTIATE_ALLREDUCE", f"{rank}.{i}"
            pair = {
                "name": name,
                "cat": "negotiate",
                "id": identity,
                "pid": pid,
                "tid": tid + 2,
            }
            records.append({**pair, "ph": "b", "ts": at + 2, "args": args})
            records.append({**pair, "ph": "e", "ts": at + 1200})
            # Inner spans come before the outer one, which ends later; PACK begins with ALLREDUCE.
            span("PACK", tid + 1, at + 300, 100)
            span("REDUCE", tid + 1, at + 400, 100)
            span("UNPACK", tid + 1, at + 500, 100)
            span("ALLREDUCE", tid + 1, at + 300, 300)
            mark = {"name": "CYCLE_START", "ph": "i", "ts": at, "s": "g"}
            records.append({**mark, "pid": pid, "tid": tid + 1})
    return records


def test_viewer_shows_every_rank_row_and_span(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(sample(3)))
    model = open_or_skip(path)
    assert model.warnings == []
    assert [model.processes[pid].name for pid in (1, 2, 3)] == [
        "rank 0 (host)",
        "rank 1 (host)",
        "rank 2 (host)",
    ]
    assert model.instants == {"CYCLE_START": 30}
    for rank in range(3):
        rows = model.processes[rank + 1].rows
        caller, engine, negotiation = (rows[16 * rank + offset] for offset in (1, 2, 3))
        assert (caller.name, engine.name, negotiation.name) == (
            "caller",
            "engine",
            "negotiation",
        )
        assert caller.slices == {"SUBMIT": 10}
        assert engine.slices == {
            "PACK": 10,
            "REDUCE": 10,
            "UNPACK": 10,
            "ALLREDUCE": 10,
        }
        assert engine.deepest == 1
        assert negotiation.async_slices == {"NEGOTIATE_ALLREDUCE": 10}


def test_viewer_complains_about_a_broken_timeline(tmp_path: Path) -> None:
    """This shows that the check can fail: an end without a begin causes an import warning."""
    path = tmp_path / "timeline.json"
    records = sample(1)
    records.append({"name": "PACK", "ph": "E", "pid": 1, "tid": 2, "ts": 0.5})
    path.write_text(json.dumps(records))
    assert open_or_skip(path).warnings != []


def test_truncated_file_is_refused_before_the_viewer_guesses(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(sample(1))[:-1])
    try:
        with pytest.raises(json.JSONDecodeError):
            open_timeline(path)
    except ViewerMissingError as missing:
        pytest.skip(str(missing))


def test_a_screenshot_of_the_timeline_of_the_pages_is_a_picture(tmp_path: Path) -> None:
    record = Path(__file__).parents[3] / "benchmarks/results/timeline.json"
    model = open_or_skip(record)
    assert model.warnings == []
    assert len(model.processes) == 3
    screenshot(record, tmp_path / "shown.png")
    assert (tmp_path / "shown.png").read_bytes().startswith(b"\x89PNG")


JOB = """
import torch
import hororing.torch as hvd

hvd.init()
for step in range(3):
    hvd.allreduce(torch.ones(1000), name="gradient")
hvd.broadcast(torch.ones(3), root_rank=0, name="start")
hvd.shutdown()
"""


def test_timeline_of_a_real_job_opens_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("hororing.torch")
    path = tmp_path / "timeline.json"
    environment = {**os.environ, "HORORING_TIMELINE": str(path)}
    subprocess.run([sys.executable, "-c", JOB], env=environment, check=True, timeout=120)
    model = open_or_skip(path)
    assert model.warnings == []
    assert list(model.processes) == [1]
    names = {name for row in model.processes[1].rows.values() for name in row.slices}
    assert {"ALLREDUCE", "BROADCAST", "REDUCE"} <= names
    negotiations: dict[str, int] = {}
    for row in model.processes[1].rows.values():
        negotiations.update(row.async_slices)
    assert negotiations == {"NEGOTIATE_ALLREDUCE": 3, "NEGOTIATE_BROADCAST": 1}


def test_timeline_of_two_ranks_that_train_opens_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "timeline.json"
    ranks = Path(__file__).parents[1] / "support/timeline_ranks.py"
    environment = {"HORORING_TIMELINE": str(path), "HORORING_TIMELINE_MARK_CYCLES": "1"}
    job = mpirun.run(ranks, 2, "train", environment=environment)
    assert job.returncode == 0, job.report()
    model = open_or_skip(path)
    assert model.warnings == []
    assert list(model.processes) == [1, 2]
    assert model.instants["CYCLE_START"] >= 2 * STEPS
    gradients = 2 * LAYERS * STEPS
    for rank in range(2):
        process = model.processes[rank + 1]
        assert process.name is not None
        assert process.name.startswith(f"rank {rank} (")
        assert process.sort_index == rank
        rows = {row.name: row for row in process.rows.values()}
        hooks = sum(row.slices.get("HOOK", 0) for row in rows.values())
        assert hooks == gradients
        assert {"PLAN", "ALLREDUCE", "PACK", "REDUCE", "UNPACK", "COMPLETE"} <= set(
            rows["engine"].slices
        )
        assert rows["engine"].deepest >= 1  # PACK, REDUCE and UNPACK inside ALLREDUCE
        assert rows["negotiation"].async_slices["NEGOTIATE_ALLREDUCE"] == gradients
