"""The results of a benchmark: rows, and the circumstances of the measurement.

A row is one contestant of one measure in one case: {"measure", "case", "who", "median_us",
"p10_us", "p90_us", "series", ...}, optionally with "nbytes" (per rank). Files are JSON, and contain
neither user names nor folders of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ROOT = Path(__file__).parents[1]


def human(nbytes: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} B"


def arguments(doc: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="smoke test")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each contestant and case")
    parser.add_argument("--seed", type=int, default=1, help="of the order of turns")
    return parser


def print_rows(rows: list[Row], base: str = "hororing") -> None:
    """Print one case: all contestants, and their times as multiples of `base`."""
    ours = next(row["median_us"] for row in rows if row["who"] == base)
    for row in rows:
        print(
            f"{row['measure']:<22} {row['case']:>14}  {row['who']:<28} {row['median_us']:>12.1f} us"
            f"  {row['p10_us']:>12.1f} .. {row['p90_us']:>12.1f}  {row['median_us'] / ours:>7.2f}x",
            flush=True,
        )


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def busy_share(seconds: float = 1.0) -> float:
    """Return the share of this machine's cores that others use."""

    def ticks() -> tuple[int, int]:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]  # all; idle plus waiting for disks

    (total, idle), _ = ticks(), time.sleep(seconds)
    later_total, later_idle = ticks()
    return round(1 - (later_idle - idle) / max(1, later_total - total), 3)


def machine() -> dict[str, Any]:
    """Return the machine, the date, the commit, and how busy the machine is."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": commit or None,
        "cores": os.cpu_count(),
        "processor": processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "busy_share_before": busy_share(),
    }


def command() -> str:
    """Return the command line, without the result file, whose path names a folder."""
    args = sys.argv[1:]
    if "--json" in args:
        place = args.index("--json")
        args = args[:place] + args[place + 2 :]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *args])


def save(path: str | None, rows: list[Row]) -> None:
    """Write rows and circumstances to `path`, if given. Called whenever there are new rows."""
    if path:
        import peers  # here, because it initializes MPI

        report = {
            "command": command(),
            "ranks": peers.MPI.COMM_WORLD.size,
            "versions": peers.versions(),
            "load_average": os.getloadavg()[0],
            "rows": rows,
        }
        Path(path).write_text(json.dumps(report, indent=1) + "\n")
