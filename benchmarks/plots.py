"""Plots (PNG) of what benchmarks/bench.py has written, beside it.

python benchmarks/plots.py [benchmarks/results/bench.json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib
from table import RESULTS, Report, by_case, rows, sums

matplotlib.use("Agg")
from matplotlib import pyplot as plt

OURS = {"color": "black", "linewidth": 2.2}


def bus_bandwidth(report: Report, ranks: int, path: Path) -> None:
    """Sizes against GB/s, a line per contestant, with the band from p10 to p90."""
    lines: dict[str, list[tuple[int, float, float, float]]] = {}
    for found in sums(report, ranks).values():
        for who, row in found.items():
            bytes_of = row["nbytes"] * 2 * (ranks - 1) / ranks / 1e3  # per us, in GB/s
            low, high = (bytes_of / row[key] for key in ("p90_us", "p10_us"))
            lines.setdefault(who, []).append(
                (row["nbytes"], bytes_of / row["median_us"], low, high)
            )
    if not lines:
        return
    figure, axes = plt.subplots(figsize=(8, 5))
    for who, points in lines.items():
        x, median, low, high = zip(*points, strict=True)
        style = OURS if who == "hororing" else {"linestyle": "--" if "limit" in who else "-"}
        (line,) = axes.plot(x, median, marker="o", markersize=3, label=who, **style)
        if who in ("hororing", "gloo") or (who.startswith("Open MPI") and "tuned" not in who):
            axes.fill_between(x, low, high, color=line.get_color(), alpha=0.12)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s",
             title=f"in-place sums of float32, {ranks} ranks")  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def bars(report: Report, part: str, ranks: int, key: str, title: str, path: Path) -> None:
    """A group of bars per case, in times of ours: longer is slower."""
    cases = by_case(rows(report, part, ranks))
    if not cases:
        return
    names = [who for who in next(iter(cases.values())) if who != "plain"]
    figure, axes = plt.subplots(figsize=(8, 1 + 0.32 * len(cases) * len(names)))
    for index, found in enumerate(reversed(cases.values())):
        ours = found["hororing"][key]
        for number, who in enumerate(reversed(names)):
            place = index + 0.8 * (number / len(names) - 0.5)
            ratio = found[who][key] / ours
            axes.barh(place, ratio, 0.8 / len(names), color=f"C{len(names) - 1 - number}",
                      label=who if index == 0 else None)  # fmt: skip
            axes.text(max(ratio, 0), place, f" {ratio:.1f}x", va="center", fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(cases)), list(reversed(cases)))
    axes.set(xlabel="time in times of hororing's; below 1: we lose", title=title)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(reversed(handles), reversed(labels), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", default=str(RESULTS))
    path = Path(parser.parse_args().file)
    report = json.loads(path.read_text())
    for ranks in (2, 4):
        bus_bandwidth(report, ranks, path.with_name(f"{path.stem}-sums-{ranks}.png"))
        bars(report, "sets", ranks, "median_us", f"all gradients at once, {ranks} ranks",
             path.with_name(f"{path.stem}-sets-{ranks}.png"))  # fmt: skip
        bars(report, "step", ranks, "overhead_us", f"overhead of a training step, {ranks} ranks",
             path.with_name(f"{path.stem}-step-{ranks}.png"))  # fmt: skip


if __name__ == "__main__":
    main()
