"""Full runs of the examples for large batches and hierarchical SGD, in torch and Keras.

    python benchmarks/digits.py run --seeds 1 2 3      # a quarter of an hour; adds to digits.json
    python benchmarks/digits.py show                   # writes digits.md and its plots

Each run is an `mpirun` command, which is part of the results; the examples record their own figures
(`--record`, hororing.toolkit.tracking). A seed determines the test images, the initial weights, and
which rank is late in which step. Learning rates were not tuned. digits.md names what such a data
set cannot show.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import record

from hororing.toolkit.tracking import read_run

RESULTS = Path(__file__).parent / "results"
LARGE, HIERARCHICAL = "large batches", "hierarchical SGD"
Row = dict[str, Any]


def commands(seed: int) -> Iterator[tuple[str, str, str]]:
    """Return title, framework and command of every job."""
    for batch in (64, 512, 1024):
        for options in ("--optimizer sgd --lr 0.1", "--optimizer lars --lr 0.5"):
            command = f"large_batch_digits.py --batch-size {batch // 2} {options} --seed {seed}"
            yield LARGE, "torch", f"mpirun -np 2 python examples/{command}"
    command = f"large_batch_digits_keras.py --batch-size 256 --seed {seed}"
    yield LARGE, "keras", f"mpirun -np 2 python examples/{command}"
    ways = "--ways synchronous local hierarchical delayed"
    command = f"python examples/hierarchical_sgd_digits.py {ways} --seed {seed}"
    yield HIERARCHICAL, "torch", f"mpirun -np 4 {command}"
    command = f"python examples/hierarchical_sgd_digits_keras.py {ways} --seed {seed}"
    yield HIERARCHICAL, "keras", f"env KERAS_BACKEND=torch mpirun -np 4 {command}"


def label(config: dict[str, Any]) -> str:
    """Return the name of a run in tables and plots."""
    if "way" in config:
        return str(config["way"])
    return f"{config.get('optimizer', 'lars').upper()}, batch {config['batch']}"


def rows_of(folder: Path, **more: Any) -> list[Row]:
    """Return a row with name, seed and curves for each record in `folder`."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        run = read_run(path)
        if run.status != "completed":
            raise ValueError(f"{run.name} is {run.status}: {run.notes}")
        curves: dict[str, Any] = {"at": run.metrics["loss"].steps}
        curves |= {name: [round(v, 4) for v in each.values] for name, each in run.metrics.items()}
        versions = {name: str(each) for name, each in run.head["versions"].items()}
        head = {"who": label(run.config), "seed": run.config["seed"], "ranks": run.head["ranks"]}
        rows.append({**more, **head, "versions": versions, "curves": curves})
    return rows


def run(seeds: list[int], file: Path) -> None:
    """Run the jobs that `file` lacks, and write it after each of them."""
    report = json.loads(file.read_text()) if file.exists() else {**record.machine(), "rows": []}
    for seed in seeds:
        for title, framework, command in commands(seed):
            if any(row["command"] == command for row in report["rows"]):
                continue
            with tempfile.TemporaryDirectory() as folder:
                busy, begin = record.busy_share(), time.perf_counter()
                words = [*shlex.split(command), "--record", folder]
                subprocess.run(words, cwd=record.ROOT, check=True, timeout=280)
                wall_s = round(time.perf_counter() - begin, 1)
                head = {"title": title, "framework": framework, "command": command}
                circumstances = {"wall_s": wall_s, "busy_share_before": busy}
                report["rows"] += rows_of(Path(folder), **head, **circumstances)
            report["commit"] = record.machine()["commit"]
            rows = ",\n".join(json.dumps(row) for row in report["rows"])
            begin_text = json.dumps({**report, "rows": []}, indent=1).replace("[]\n}", "[\n")
            file.write_text(f"{begin_text}{rows}\n]}}\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["run", "show"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    chosen = parser.parse_args(arguments)
    if chosen.part == "show":
        import digits_show

        digits_show.show(chosen.out)
    else:
        run(chosen.seeds, chosen.out / "digits.json")


if __name__ == "__main__":
    main()
