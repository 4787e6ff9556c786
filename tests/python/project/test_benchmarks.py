"""The benchmarks run, and write results for the tables and plots.

The times do not matter here. Most benchmarks share one job. Horovod, which may be missing, is fake.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import mpirun
import pytest
import tiers

ROOT = Path(__file__).parents[3]
BENCHMARKS = ROOT / "benchmarks"
FAKE_HOROVOD = Path(__file__).parents[1] / "support/fake_horovod"
HOROVODS = {"Horovod", "Horovod, 0.1 ms"}
SCRIPTS = ["allreduce", "sets", "torch_step", "ddp", "latency", "memory", "process_sets"]
RANKS = 3  # what process_sets needs
TIMED = {"median_us", "p10_us", "p90_us", "series"}

sys.path.append(str(BENCHMARKS))


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("results")
    job = mpirun.run(__file__, RANKS, str(folder), environment={"PYTHONPATH": str(FAKE_HOROVOD)})
    assert job.returncode == 0, job.report()
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in SCRIPTS}


@tiers.full
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_runs_and_writes_rows(reports, script):
    report = reports[script]
    assert report["ranks"] == RANKS
    assert report["versions"]["mpi"]
    assert report["command"].startswith("python benchmarks/")
    assert report["rows"]
    for row in report["rows"]:
        assert {"measure", "case", "who"} < set(row)
        if script != "memory":
            assert set(row) >= TIMED
            assert 0 < row["p10_us"] <= row["median_us"] <= row["p90_us"]


@tiers.full
def test_all_contestants_take_part(reports):
    sums = {row["who"] for row in reports["allreduce"]["rows"]}
    assert {"hororing", "gloo", "copy (limit)", reports["allreduce"]["versions"]["mpi"]} <= sums
    steps = {row["who"] for row in reports["torch_step"]["rows"]}
    assert {"plain", "hororing", "DDP", "DDP's views"} <= steps
    for script in ("allreduce", "sets", "torch_step"):
        assert {row["who"] for row in reports[script]["rows"]} >= HOROVODS
    assert {row["who"] for row in reports["sets"]["rows"]} >= {f"{who} grouped" for who in HOROVODS}
    assert [row["who"] for row in reports["memory"]["rows"]] == ["hororing", "Horovod"] * RANKS


@tiers.full
def test_hooks_run_and_make_rows(tmp_path):
    bench = importlib.import_module("bench")
    results = tmp_path / "hooks.json"
    job = mpirun.run(
        BENCHMARKS / "hooks.py",
        2,
        *("--rounds", "1", "--ways", "hororing", "horovod", "horovod_quick"),
        *("--json", str(results)),
        environment={"PYTHONPATH": os.pathsep.join([str(FAKE_HOROVOD), *sys.path])},
    )
    assert job.returncode == 0, job.report()
    rows = bench.hook_rows(json.loads(results.read_text()))
    assert [row["who"] for row in rows] == ["plain", "hororing", "Horovod", "Horovod, 0.1 ms"]


@tiers.full
def test_the_step_of_keras_runs_and_writes_rows(tmp_path):
    results = tmp_path / "keras.json"
    job = mpirun.run(
        BENCHMARKS / "keras_step.py",
        2,
        *("--quick", "--loop", "custom", "--json", str(results)),
        environment={"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert job.returncode == 0, job.report()
    rows = json.loads(results.read_text())["rows"]
    assert [row["who"] for row in rows] == ["plain", "hororing", "MultiWorkerMirroredStrategy"]


@tiers.full
@pytest.mark.parametrize("patience_s", [30, 1e-9])
def test_figures_of_hosts_are_written_also_of_ways_without_patience(tmp_path, patience_s):
    results = tmp_path / "hosts.json"
    job = mpirun.run(
        BENCHMARKS / "hosts.py",
        2,
        *("--mbit", "200", "--rounds", "2", "--bytes", "8", "100000", "--json", str(results)),
        *("--only", "auto", "mpi", "--collective", "broadcast", "reducescatter"),
        *("--patience", str(patience_s)),
        environment={"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert job.returncode == 0, job.report()
    told = json.loads(results.read_text())
    cases = [(row["collective"], row["bytes"]) for row in told["results"]]
    assert cases == [(c, n) for c in ("broadcast", "reducescatter") for n in (8, 100000)]
    for row in told["results"]:
        for way in ("auto", "mpi"):
            assert row[way]["turns"] == (2 if patience_s > 1 else 0)
            assert row[way]["median_us"] > 0
            assert row[way]["cpu_us"] > 0


def test_what_hosts_had_when_it_was_ended_makes_rows_and_a_table():
    bench = importlib.import_module("bench")
    table = importlib.import_module("table")
    figures = {"turns": 3, "median_us": 5e5, "p10_us": 4e5, "p90_us": 6e5, "of_limit": 0.5}
    slow = {**figures, "turns": 0, "median_us": 5e6}
    told = {"mpi": "Open MPI v5.0.11, package", "results": [
        {"collective": "alltoall", "bytes": 4 << 20, "auto": figures | {"cpu_us": 12_300},
         "mpi": slow},
        {"collective": "broadcast", "bytes": 4 << 20, "gloo": dict(figures)},
        {"collective": "allreduce", "bytes": 4 << 20},
    ]}  # fmt: skip
    rows = bench.host_rows(told)
    assert [(row["case"], row["who"]) for row in rows] == [
        ("alltoall of 4 MiB", "hororing"), ("alltoall of 4 MiB", "Open MPI 5.0.11"),
        ("alltoall of 4 MiB", "wire (limit)"),
        ("broadcast of 4 MiB", "gloo"), ("broadcast of 4 MiB", "wire (limit)"),
    ]  # fmt: skip
    lines = table.compared(table.by_case(rows)).splitlines()
    assert len(lines) == 3
    assert "10.0x, the first call" in lines[2]
    assert "| alltoall of 4 MiB | 12.3 ms |  |  |" in table.processor_times(table.by_case(rows))


@pytest.fixture
def report(reports, tmp_path) -> Path:
    """Return a results file like those of bench.py, with one failed part."""
    bench = importlib.import_module("bench")
    parts = {"allreduce": "sums", "sets": "sets", "torch_step": "step", "ddp": "ddp",
             "latency": "latency"}  # fmt: skip
    told = [
        reports[script] | {"part": part, "ranks": 2, "load_average_before": 1.0}
        for script, part in parts.items()
    ]
    told.append({"part": "mpich", "ranks": 2, "rows": [], "failed": "MPICH was not found"})
    path = tmp_path / "bench.json"
    machine = {"date": "today", "commit": "abc", "cores": 2, "processor": "P", "system": "S",
               "python": "3", "busy_share_before": 0.0, "busy_share_after": 0.5}  # fmt: skip
    path.write_text(json.dumps({
        "command": "c", "remark": "a test", "machine": machine, "took_s": 1,
        "peers": bench.found(told), "parts": told,
    }))  # fmt: skip
    return path


@tiers.full
def test_tables_show_every_part_with_losses_and_failures(report):
    table = importlib.import_module("table")
    told = json.loads(report.read_text())
    row = next(r for r in told["parts"][0]["rows"] if r["who"] == "gloo" and r["case"] == "4 B")
    ours = next(r for r in told["parts"][0]["rows"] if r["who"] == "hororing")
    row["median_us"] = ours["median_us"] / 2
    sections = table.sections(told)
    assert len(sections) == len(told["parts"]) - 1
    sums = sections["Blocking sum of float32, in place, 2 ranks"]
    assert "**0.5x**" in sums.splitlines()[2]
    told["parts"][1]["commit"] = "old"
    lines = table.page_part(told).splitlines()
    assert "From earlier runs: commit old: sets on 2 ranks." in lines
    assert "Failed or incomplete: mpich on 2 ranks (MPICH was not found)." in lines
    assert any("MPICH: not found; torch DDP, gloo:" in line for line in lines)
    whole = f"before\n{table.BEGIN}\nold\n{table.END}\nafter"
    part = table.with_part(whole, "new")
    assert part == f"before\n{table.BEGIN}\n\nnew\n\n{table.END}\nafter"


def test_the_table_of_dtypes_has_horovod_where_it_has_the_dtype():
    table = importlib.import_module("table")
    took = {"float32": {"hororing": 8.0, "gloo": 80.0, "Horovod": 40.0},
            "float16": {"hororing": 4.0, "gloo": 40.0, "Horovod": 60.0},
            "bfloat16": {"hororing": 4.0, "gloo": 20.0}}  # fmt: skip
    rows = [{"measure": f"{dtype} sum", "case": "1 MiB", "who": who, "median_us": us}
            for dtype, ways in took.items() for who, us in ways.items()]  # fmt: skip
    head, _, *lines = table.dtypes(
        {"parts": [{"part": "dtypes", "ranks": 2, "rows": rows}]}
    ).splitlines()  # too wide for one row per size
    assert [tuple(cell.strip() for cell in line.strip("|").split("|"))
            for line in (head, *lines)] == [
        ("elements of", "1 MiB"),
        ("float32", "8.0 us"), ("gloo", "10.0x"), ("Horovod", "5.0x"),
        ("float16", "4.0 us"), ("float32", "2.0x"),
        ("gloo, float16", "10.0x"), ("Horovod, float16", "15.0x"),
        ("bfloat16", "4.0 us"), ("float32", "2.0x"), ("gloo, bfloat16", "5.0x"),
    ]  # fmt: skip


def test_overheads_within_the_noise_have_no_figure():
    table = importlib.import_module("table")
    ways = {"plain": 0.0, "hororing": -9000.0, "DDP": 30000.0, "Horovod": 1200.0}
    rows = {who: {"median_us": 200000.0, "overhead_us": us} for who, us in ways.items()}
    assert table.overheads({"convolutional": rows}).splitlines()[2] == (
        "| convolutional | 200 ms | under 5% | 30.0 ms | under 5% |"
    )


@tiers.full
def test_committed_results_become_plots(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install .[bench]")
    plots = importlib.import_module("plots")
    for name in ("bench.json", "simulate.json"):
        shutil.copy(plots.RESULTS.with_name(name), tmp_path)
    monkeypatch.setattr(sys, "argv", ["plots.py", str(tmp_path / "bench.json")])
    plots.main()
    for name in ("bench-sums-2.png", "scaling.png", "training-rates.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_pages_show_the_committed_results():
    table = importlib.import_module("table")
    told = json.loads(table.RESULTS.read_text())
    for page, part_of in table.PAGES.items():
        text = page.read_text()
        assert text == table.with_part(text, part_of(told)), "python benchmarks/table.py --write"


def test_edits_of_horovod_are_all_made_or_none(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    build = importlib.import_module("build_horovod")
    edits = (
        build.Edit("a", "14", "17"),
        build.Edit("a", "old", "new"),
        build.Edit("b", "14", "17"),
    )
    (tmp_path / "a").write_text("standard 14, old")
    (tmp_path / "b").write_text("14 and 14")
    with pytest.raises(SystemExit, match="b: '14' occurs 2 times, not once"):
        build.edit(tmp_path, edits)
    assert (tmp_path / "a").read_text() == "standard 14, old"
    (tmp_path / "b").write_text("14")
    build.edit(tmp_path, edits)
    assert [(tmp_path / file).read_text() for file in "ab"] == ["standard 17, new", "17"]


if __name__ == "__main__":
    for script in SCRIPTS:
        print(script, flush=True)
        more = ["--limit"] if script == "allreduce" else []
        results = str(Path(sys.argv[1], f"{script}.json"))
        importlib.import_module(script).main(["--quick", "--json", results, *more])
    importlib.import_module("sets").main(["--quick", "--mixed"])
    horovod = importlib.import_module("horovod.torch")
    assert horovod.cycles == {"1", "0.1"}
    assert not horovod.awake
    assert "HOROVOD_CYCLE_TIME" not in os.environ  # hororing would read it, too
