"""Run the whole comparison into one result file (`make bench`). It takes half an hour on 2 cores.

    python benchmarks/bench.py                    # everything
    python benchmarks/bench.py --only step sets   # some parts, merged into the existing file
    python benchmarks/bench.py --quick            # a smoke test

Each part is one of the benchmarks in this folder, run as its own mpirun job, in which hororing and
its peers take turns (turns.py). A part that fails or times out is recorded as failed, with its
figures so far; so is a part that no longer fits --budget. Missing peers are named.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import record

HERE = Path(__file__).parent
MIB = 1 << 20

# Known to make Open MPI's allreduce fast: a ring, and a malloc that keeps the pages of temporaries
# (otherwise page faults take half of the time). The malloc settings apply to all contestants.
TUNED = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "BENCHMARK_MPI_NOTE": "tuned",
}

# Between emulated hosts, each of which assumes that it has all cores to itself.
HOSTS = {"OMPI_MCA_btl": "self,sm,tcp", "OMPI_MCA_pml": "ob1", "OMPI_MCA_osc": "^ucx",
         "OMPI_MCA_mpi_yield_when_idle": "1"}  # fmt: skip


class Part(NamedTuple):
    """One job.

    `scale` multiplies --seconds, for parts that take longer than their results are worth. `layout`
    is the number of ranks on each emulated host, and `rate` the rate of the links. `rows_of`
    converts the report of a script that has its own format and options.
    """

    name: str
    ranks: int
    script: str
    args: tuple[str, ...] = ()
    environment: dict[str, str] = {}  # noqa: RUF012  # nobody writes to it
    mpich: bool = False
    scale: float = 1.0
    layout: str = ""
    rate: str = "200mbit"
    rows_of: Callable[[dict[str, Any]], list[record.Row]] | None = None


def hook_rows(report: dict[str, Any]) -> list[record.Row]:
    """Convert the report of hooks.py to rows of training steps."""
    names = {"ddp": "DDP", "ddp_views": "DDP's views", "horovod": "Horovod",
             "horovod_quick": "Horovod, 0.1 ms"}  # fmt: skip
    rows = []
    for way, figures in report.pop("ways").items():
        row = {"measure": "training step", "case": "1,000 tiny layers"}
        row["who"] = names.get(way, way)
        for key, prefix in (("step_ms", ""), ("over_plain_ms", "overhead_")):
            for figure in ("median", "p10", "p90"):
                name = f"{prefix}{figure}_us".replace("overhead_median", "overhead")
                row[name] = figures[key][figure] * 1e3
        rows.append(row)
    return rows


def host_rows(report: dict[str, Any]) -> list[record.Row]:
    """Convert the report of hosts.py: collectives over several hosts, and the wire limit."""
    mpi = report["mpi"].split(",")[0].replace(" v", " ")
    names = {"auto": "hororing", "over_mpi": "hororing, over MPI", "mpi": mpi, "gloo": "gloo"}
    rows = []
    for of_size in report.pop("results"):
        nbytes, collective = of_size.pop("bytes"), of_size.pop("collective")
        if not of_size:  # the job ended before the first turn
            continue
        name = record.human(nbytes)
        if collective != "allreduce":
            name = f"{collective} of {name}"
        case = {"measure": "several hosts", "case": name, "nbytes": nbytes}
        for way, figures in of_size.items():
            who = names.get(way, f"hororing, {way.replace('_', ' ')}")
            rows.append({**case, "who": who, **figures})
        limit = rows[-1]["of_limit"] * rows[-1]["median_us"]
        rows.append({**case, "who": "wire (limit)", "median_us": limit, "p10_us": limit,
                     "p90_us": limit})  # fmt: skip
    return rows


def sizes(*mib: float) -> tuple[str, ...]:
    return ("--sizes", *(str(int(size * MIB)) for size in mib))


# Ranks and the layout of emulated hosts.
LAYOUTS = ((4, "1,1,1,1"), (6, "2,2,2"), (8, "4,4"))
ALONE = ("--peers", "--horovod")  # hororing and MPI
ONE_HOROVOD = ("--horovod", "1")  # a shorter cycle helps only small sums, with one core per rank
SCALING = ("--models", "convolutional", "--ways", "hororing", "DDP", "--horovod")
PARTS = [
    Part("sums", 2, "allreduce", ("--limit",)),
    Part("sums", 4, "allreduce", ("--limit", *ONE_HOROVOD), scale=0.7),
    *(
        Part("tuned", ranks, "allreduce", (*sizes(1, 4, 16, 64, 256), *ALONE), TUNED)
        for ranks in (2, 4)
    ),
    Part("mpich", 2, "allreduce", ALONE, mpich=True),
    # MPICH spins without yielding: with more ranks than cores, larger sums take minutes.
    Part("mpich", 4, "allreduce", (*ALONE, "--max-bytes", str(MIB)), mpich=True, scale=0.5),
    Part("dtypes", 2, "allreduce", (
        *sizes(1 / 16, 1, 16, 64), "--elements",
        "--dtypes", "float32", "float16", "bfloat16", *ONE_HOROVOD,
    )),
    Part("sets", 2, "sets"),
    Part("sets", 4, "sets", ONE_HOROVOD, scale=0.5),
    Part("step", 2, "torch_step"),
    Part("step", 4, "torch_step", ONE_HOROVOD, scale=0.5),
    *(Part("scaling", ranks, "torch_step", SCALING) for ranks in (1, 2, 3, 4)),
    *(
        Part("scaling-hosts", hosts, "torch_step", SCALING, HOSTS,
             layout=",".join("1" * hosts), rate="1gbit")
        for hosts in (1, 2, 3, 4)
    ),
    *(
        # LOCAL_WORLD_SIZE tells gloo that the ranks share a host.
        Part(name, ranks, "ddp", environment=environment, scale=2.0)
        for ranks in (2, 4)
        for name, environment in (("ddp", {}), ("ddp-local", {"LOCAL_WORLD_SIZE": str(ranks)}))
    ),
    Part("keras", 2, "keras_step", ("--loop", "custom", "--rounds", "10")),
    Part("latency", 2, "latency"),
    Part("memory", 2, "memory"),
    Part("memory", 4, "memory"),
    *(
        # malloc returns freed memory to the system, so that only memory in use counts.
        Part(f"memory-{way}", 2, "gradient_memory", (way,), {"MALLOC_MMAP_THRESHOLD_": str(MIB)})
        for way in ("hororing", "ddp-views", "ddp")
    ),
    Part("process sets", 3, "process_sets", ("--rounds", "9")),
    Part("hooks", 2, "hooks", ("--model", "tiny", "--rounds", "12"), rows_of=hook_rows),
    *(
        Part("hosts", ranks, "hosts", (
            "--mbit", "200", "--rounds", "4", "--bytes", "65536", "16777216",
            "--only", "auto", "over_mpi", "flat", "mpi", "gloo", "--patience", "10",
        ), HOSTS, layout=layout, rows_of=host_rows)
        for ranks, layout in LAYOUTS
    ),
    *(
        Part("verbs", ranks, "hosts", (
            "--mbit", "200", "--rounds", "3", "--bytes", str(4 * MIB),
            "--only", "auto", "over_mpi", "mpi", "gloo", "--patience", "5",
            "--collective", "allgather", "broadcast", "reducescatter", "alltoall",
        ), HOSTS, layout=layout, rows_of=host_rows)
        for ranks, layout in LAYOUTS
    ),
]  # fmt: skip
PARTS = [part for part in PARTS if (HERE / f"{part.script}.py").exists()]


def mpich_python() -> Path | None:
    """Return Python of the environment that uses MPICH (`make bench-mpich`)."""
    python = record.ROOT / "build/mpich/bin/python"
    return python if (python.parent.parent / ".ready").exists() else None


def why_no_hosts() -> str:
    """Return why this machine does not permit emulated hosts; empty if it does."""
    check = [str(record.ROOT / "tests/hosts.sh"), "--check"]
    return subprocess.run(check, capture_output=True, text=True).stderr.strip()


def command_of(part: Part, options: argparse.Namespace, results: Path) -> list[str]:
    """The mpirun line."""
    python, mpirun = Path(sys.executable), shutil.which("mpirun")
    if part.mpich:
        python = mpich_python() or python
        mpirun = str(python.parent / "mpirun")
    assert mpirun, "mpirun is not on the PATH"
    length = ["--seconds", str(options.seconds * part.scale), *["--quick"] * options.quick]
    if part.rows_of is not None:
        length = ["--rounds", "1"] * options.quick
    start = [mpirun, "-np", str(part.ranks)]
    if part.layout:
        start = [str(record.ROOT / "tests/hosts.sh"), part.layout, "-r", part.rate, mpirun]
        start += ["-x", "PYTHONPATH"] * ("PYTHONPATH" in os.environ)
    script = str((HERE / part.script).with_suffix(".py"))
    return [*start, str(python), script, *part.args, *length, "--json", str(results)]


def run(part: Part, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Run a part, and return its report: what the script wrote, or why it wrote nothing."""
    report: dict[str, Any] = {"part": part.name, "ranks": part.ranks, "rows": []}
    if part.layout and (why := why_no_hosts()):
        return report | {"failed": why}
    if part.mpich and mpich_python() is None:
        return report | {"failed": "MPICH was not found: make bench-mpich installs it"}
    if limit_s < 1:
        return report | {"failed": "not run: --budget was used up"}
    report["load_average_before"] = os.getloadavg()[0]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        results = Path(folder, "results.json")
        process = subprocess.Popen(
            command_of(part, options, results),
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder, **part.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
            failed = "" if process.returncode == 0 else f"it ended with code {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            failed = f"it took more than {limit_s:.0f} s"
        print(output, flush=True)
        if results.exists():
            report |= json.loads(results.read_text())
            if part.rows_of is not None:
                report["rows"] = part.rows_of(report)
        if failed:
            failed += f" after {len(report['rows'])} figures: {output[-2000:]}"
            report["failed"] = failed.replace(str(record.ROOT), ".")
    return report | {"took_s": round(time.monotonic() - begin, 1)}


def found(parts: list[dict[str, Any]]) -> dict[str, str]:
    """Return every peer with its version, or with the reason why it did not take part."""
    versions: dict[str, Any] = {}
    for part in parts:
        versions |= {k: v for k, v in part.get("versions", {}).items() if k != "mpi" and v}
    mpis = sorted({part["versions"]["mpi"] for part in parts if "versions" in part})
    missing = "not found"

    def of(vendor: str) -> str:
        return " and ".join(x.removeprefix(vendor + " ") for x in mpis if vendor in x) or missing

    return {
        "Open MPI": of("Open MPI"),
        "MPICH": of("MPICH"),
        "torch DDP, gloo": versions.get("torch", missing),
        "MultiWorkerMirroredStrategy": versions.get("tensorflow-cpu", missing),
        "Horovod": versions.get("horovod", f"{missing} (make bench-horovod builds it)"),
    }


def merged(new: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Return the new parts, and those of an earlier run that were not repeated, in order."""
    order = [(part.name, part.ranks) for part in PARTS]
    old = []
    if path.exists():
        report = json.loads(path.read_text())
        old = [{"commit": report["machine"]["commit"], **part} for part in report["parts"]]
    known = {(part["part"], part["ranks"]): part for part in [*old, *new]}
    return [known[key] for key in order if key in known]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=sorted({part.name for part in PARTS}))
    parser.add_argument("--out", default=str(HERE / "results/bench.json"), help="result file")
    parser.add_argument("--remark", default="", help="about the machine: quiet, shared ...")
    parser.add_argument("--seconds", type=float, default=0.7, help="for each contestant and case")
    parser.add_argument("--limit", type=float, default=240, help="time limit of a part, in seconds")
    parser.add_argument("--budget", type=float, default=1800, help="seconds for all parts")
    parser.add_argument("--quick", action="store_true", help="smoke test")
    options = parser.parse_args()
    begin = time.monotonic()
    machine = record.machine()
    parts = []
    for part in PARTS:
        if options.only is None or part.name in options.only:
            print(f"==== {part.name}, {part.ranks} ranks", flush=True)
            left = options.budget - (time.monotonic() - begin)
            report = run(part, options, min(options.limit, left))
            parts.append(report | {"commit": machine["commit"]})
            print(f"==== {parts[-1].get('failed', 'took')}, {parts[-1].get('took_s', 0)} s")
    out = Path(options.out)
    if options.only:
        parts = merged(parts, out)
    whole = {
        "command": record.command(),
        "remark": options.remark,
        "machine": machine | {"busy_share_after": record.busy_share()},
        "took_s": round(time.monotonic() - begin),
        "peers": found(parts),
        "parts": parts,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(whole, indent=1) + "\n")
    for peer, how in whole["peers"].items():
        print(f"{peer}: {how}")
    failures = [part for part in parts if "failed" in part]
    for part in failures:
        print(f"FAILED: {part['part']}, {part['ranks']} ranks: {part['failed'][:200]}")
    print(f"{out}: {whole['took_s']} s")


if __name__ == "__main__":
    main()
