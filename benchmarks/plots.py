"""Plots (PNG) of what benchmarks/bench.py has written, beside it.

python benchmarks/plots.py [benchmarks/results/bench.json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib
from record import Row
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


def bars(
    cases: dict[str, dict[str, Row]], key: str, title: str, path: Path, *, relative: bool
) -> None:
    """A group of bars per case, longer is slower: in times of ours, or in milliseconds."""
    if not cases:
        return
    names = list(dict.fromkeys(who for case in cases.values() for who in case if who != "plain"))
    figure, axes = plt.subplots(figsize=(8, 1 + 0.3 * len(cases) * len(names)))
    for index, found in enumerate(reversed(cases.values())):
        for number, who in enumerate(names):
            if who not in found:
                continue
            place = index + 0.8 * (0.5 - (number + 0.5) / len(names))
            length = found[who][key] / (found["hororing"][key] if relative else 1e3)
            axes.barh(place, length, 0.8 / len(names), color=f"C{number}",
                      label=who if index == 0 else None)  # fmt: skip
            text = f" {length:.1f}x" if relative else f" {length:.2f} ms"
            axes.text(max(length, 0), place, text, va="center", fontsize=7)
    axes.set_yticks(range(len(cases)), list(reversed(cases)))
    if relative:
        axes.axvline(1, color="black", linewidth=0.8)
    axes.set(title=title, xlabel="time in times of hororing's; below 1: we lose" if relative
             else "ms over the step without communication")  # fmt: skip
    axes.margins(x=0.12)
    axes.legend(fontsize=8)
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
        sets = by_case(rows(report, "sets", ranks))
        bars(sets, "median_us", f"all gradients at once, {ranks} ranks",
             path.with_name(f"{path.stem}-sets-{ranks}.png"), relative=True)  # fmt: skip
        steps = by_case(rows(report, "step", ranks) + rows(report, "hooks", ranks))
        bars(steps, "overhead_us", f"what a training step costs more, {ranks} ranks",
             path.with_name(f"{path.stem}-step-{ranks}.png"), relative=False)  # fmt: skip


if __name__ == "__main__":
    main()
