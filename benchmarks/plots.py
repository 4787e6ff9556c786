"""Plots (PNG) of the results of benchmarks/bench.py and simulate.py, written beside them.

python benchmarks/plots.py [benchmarks/results/bench.json]
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import matplotlib
from table import RESULTS, SCALING, Report, rows, sums, training_rates

matplotlib.use("Agg")
from matplotlib import pyplot as plt

OURS = {"color": "black", "linewidth": 2.2}


def bus_bandwidth(report: Report, ranks: int, path: Path) -> None:
    """Plot GB/s over the size: a line per contestant, and a band from p10 to p90."""
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
    axes: Any, bench: Report, part: str, case: str, layouts: dict[int, str], limit: str
) -> None:
    """Plot milliseconds of hororing and its peers by layout, and the limit as a line."""
    measure = {"sets": "set of gradients", "hosts": "several hosts"}[part]
    for place, ranks in enumerate(layouts):
        found = {re.sub(r" [\d.]+(?=,|$)", "", row["who"]): row["median_us"] / 1e3
                 for row in rows(bench, part, ranks, measure) if row["case"] == case}  # fmt: skip
        peers = [who for who in ("hororing", "Horovod", "Open MPI", "Open MPI, each",
                             "DDP's views", "gloo")
                 if who in found]  # fmt: skip
        wide = 0.8 / len(peers)
        for number, who in enumerate(peers):
            axes.bar(place + wide * (number - (len(peers) - 1) / 2), found[who], wide,
                     color=f"C{number}", label=who if place == 0 else None)  # fmt: skip
        axes.plot([place - 0.45, place + 0.45], [found[limit]] * 2, "k:",
                  label="limit" if place == 0 else None)  # fmt: skip
    axes.set_xticks(range(len(layouts)), layouts.values(), fontsize=8)
    axes.set_ylabel("ms")


def scaling(bench: Report, simulated: dict[str, Any], path: Path) -> None:
    """Plot three panels: ranks of one host, hosts with slow links, many simulated ranks."""
    figure, (ranks, hosts, many) = plt.subplots(1, 3, figsize=(12, 4))
    one_host = {2: "2 ranks", 4: "4 ranks"}
    bars(ranks, bench, "sets", "ResNet-50", one_host, "copy (limit)")
    ranks.set_title("measured: all gradients of ResNet-50,\none host of 2 cores", fontsize=9)
    layouts = {4: "4 hosts\nof 1 rank", 6: "3 hosts\nof 2 ranks", 8: "2 hosts\nof 4 ranks"}
    bars(hosts, bench, "hosts", "16 MiB", layouts, "wire (limit)")
    hosts.set_title("measured: a sum of 16 MiB,\nlinks of 200 Mbit/s", fontsize=9)
    for job in simulated["scaling"]:
        line = job["algorithms"]["exchange"]
        many.plot(job["ranks"], line, "o-", markersize=3, label=job["job"].rpartition(",")[0])
    many.set_xscale("log", base=2)
    many.set(xlabel="ranks", ylabel="predicted efficiency", ylim=(0, 1.02))
    many.set_title("simulated, not measured:\na training step", fontsize=9)
    for axes in (ranks, hosts, many):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def rates(bench: Report, path: Path) -> None:
    """Plot images per second of a training step: ranks of one host, and hosts of one rank."""
    figure, both = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    for axes, (part, where) in zip(both, SCALING.items(), strict=True):
        for who, points in training_rates(bench, part).items():
            x = list(points)
            median, low, high = zip(*points.values(), strict=True)
            style = {"hororing": OURS, "plain": {"linestyle": "--"}}.get(who, {})
            label = "without communication" if who == "plain" else who
            (line,) = axes.plot(x, median, marker="o", markersize=3, label=label, **style)
            axes.fill_between(x, low, high, color=line.get_color(), alpha=0.12)
        axes.set(xlabel="ranks", xticks=x, ylim=(0, None), title=where)
        axes.grid(alpha=0.3)
    both[0].set_ylabel("images per second")
    both[0].legend(fontsize=8)
    figure.suptitle("measured: a training step on 2 cores, which 3 and 4 ranks share", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def steps(bench: Report, path: Path) -> None:
    """Plot a training step on 2 ranks, relative to the same step without communication."""
    cases = {"200 layers": "200 small layers", "convolutional": "convolutional network",
             "1,000 tiny layers": "1,000 tiny layers"}  # fmt: skip
    who = {"hororing": "hororing", "DDP": "DDP over gloo", "Horovod": "Horovod 0.28"}
    found = {(row["case"], row["who"]): row["median_us"]
             for part in ("step", "hooks") for row in rows(bench, part, 2)
             if row["who"] == "plain" or row["who"] in who}  # fmt: skip
    figure, axes = plt.subplots(figsize=(8, 3.4))
    for number, (each, label) in enumerate(who.items()):
        times = [found[case, each] / found[case, "plain"] for case in cases]
        places = [place + 0.27 * (number - 1) for place in range(len(cases))]
        drawn = axes.bar(places, times, 0.25, label=label, color=("black", "C0", "C1")[number])
        axes.bar_label(drawn, fmt="%.2f", fontsize=8)
    axes.axhline(1, color="grey", linestyle=":")
    axes.set_xticks(range(len(cases)), cases.values())
    axes.set_ylabel("time of a training step\n(without communication = 1)")
    axes.set_title("PyTorch on 2 ranks of one host; lower is better", fontsize=10)
    axes.margins(y=0.12)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", default=str(RESULTS))
    path = Path(parser.parse_args().file)
    bench = json.loads(path.read_text())
    bus_bandwidth(bench, 2, path.with_name(f"{path.stem}-sums-2.png"))
    steps(bench, path.with_name("steps.png"))
    rates(bench, path.with_name("training-rates.png"))
    simulated = path.with_name("simulate.json")
    if simulated.exists():
        scaling(bench, json.loads(simulated.read_text()), path.with_name("scaling.png"))


if __name__ == "__main__":
    main()
