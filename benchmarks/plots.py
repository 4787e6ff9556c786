"""The plot (PNG) of the README, of what benchmarks/bench.py has written, beside it.

python benchmarks/plots.py [benchmarks/results/bench.json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib
from table import RESULTS, Report, sums

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", default=str(RESULTS))
    path = Path(parser.parse_args().file)
    bus_bandwidth(json.loads(path.read_text()), 2, path.with_name(f"{path.stem}-sums-2.png"))


if __name__ == "__main__":
    main()
