"""What a benchmark writes down: rows, and under which circumstances they were measured.

A row is one contestant of one measure in one case: {"measure", "case", "who", "median_us",
"p10_us", "p90_us", "series", ...}, optionally with "nbytes" (that each rank holds). Files are
JSON; nothing in them names a user or a folder of the machine.
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
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each contestant and case")
    parser.add_argument("--seed", type=int, default=1, help="of the order of turns")
    return parser


def print_rows(rows: list[Row], base: str = "hororing") -> None:
    """One case, all contestants, with how many times as long as `base` each takes."""
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
    """The share of this machine's cores that is in use, while we do nothing."""

    def ticks() -> tuple[int, int]:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]  # all; idle and waiting for disks

    (total, idle), _ = ticks(), time.sleep(seconds)
    later_total, later_idle = ticks()
    return round(1 - (later_idle - idle) / max(1, later_total - total), 3)


def machine() -> dict[str, Any]:
    """Where and when, and how busy it was before we began."""
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
    """As one would type it; without the result file, which names a folder of the machine."""
    args = sys.argv[1:]
    if "--json" in args:
        place = args.index("--json")
        args = args[:place] + args[place + 2 :]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *args])


def save(path: str | None, rows: list[Row]) -> None:
    """Write rows and circumstances to `path`, if there is one. As often as there are new rows."""
    if path:
        import peers  # here, since it initialises MPI

        report = {
            "command": command(),
            "ranks": peers.MPI.COMM_WORLD.size,
            "versions": peers.versions(),
            "load_average": os.getloadavg()[0],
            "rows": rows,
        }
        Path(path).write_text(json.dumps(report, indent=1) + "\n")
