"""Tables and plots of the results of benchmarks/digits.py, and their limits."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import digits
from digits import Row

INTRODUCTION = """\
1,797 images of 8 x 8 pixels (scikit-learn), of which 1,438 train and 359 test: one test image is
0.28 % of accuracy. Made by `python benchmarks/digits.py run` and `show`. Means, and in
brackets the range over seeds. A seed determines the test images, the initial weights, and which
process is late in which step."""

ABOUT_LARGE = """\
40 epochs, 2 processes. The rate is scaled linearly (0.1 per 256 images for SGD, 0.5 for LARS),
with 5 epochs of warm-up and quadratic decay. **Rates were not tuned, and the number of epochs is
the same for all batches**: batches of 1,024 make only 40 updates, so the model learns less. Keras
makes more updates, because it also trains on the incomplete batch of an epoch. So SGD and LARS
differ here by their rates, and this is **no evidence for an advantage of LARS**. The runs show that
the chain (linear scaling, warm-up, decay, LARS or SGD; with torch also bfloat16 weights and
activations with stochastic rounding) trains at these batches, in both frameworks. From 32 images
per rank on, a batch-norm group is one rank, so these runs say nothing about larger groups. Keras
does not smooth labels, and has float32 weights and other initial weights and test images, so its
losses cannot be compared with torch's."""

ABOUT_HIERARCHICAL = """\
160 steps of 16 images on each of 4 processes, the first 16 synchronous. Each process is late in
1 step of 10, by sleeping 0.1 s (torch) or 0.2 s (Keras), in the same steps for all methods. Local:
all average their weights every 8th step. Hierarchical: pairs every 2nd step, all every 8th.
Delayed: the same, but averages arrive one step later. Losses are those of the mean of all weights.
They are computed after training, at the time when the last process had made the step (Keras, on
torch: after the first step). Seconds are wall time on a shared machine (see above). Losses differ
more between the seeds of one method than between methods: **they do not rank the methods**. The
stragglers are injected, one host stands for all hosts, and the data set is small: **the runs show
only how much time less waiting saves under these delays, not how much accuracy local steps cost
elsewhere.** If one rank is always late, nothing is saved (stragglers.md)."""


def groups(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """Return the rows of all seeds, by framework and name."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["framework"], row["who"]), []).append(row)
    return found


def spread(values: list[float], digits: int, factor: float = 1) -> str:
    """Return the mean and, of several values, the range."""
    low, high, middle = (f"{f(values) * factor:.{digits}f}" for f in (min, max, mean))
    return middle if len(values) == 1 else f"{middle} ({low}-{high})"


def table(rows: list[Row], timed: bool) -> list[str]:
    """Return the last values of every method: mean and range over the seeds."""
    columns = ["framework", "", "ranks", "seeds", "updates", "test loss", "test accuracy, %"]
    columns += ["s", "speed-up"] if timed else []
    lines = ["| " + " | ".join(columns) + " |", "|---|---|" + "---:|" * (len(columns) - 2)]
    found = groups(rows)
    for (framework, who), same in found.items():
        last = {name: [each["curves"][name][-1] for each in same] for name in same[0]["curves"]}
        cells = [framework, who, str(same[0]["ranks"]), str(len(same))]
        cells += [spread(last.get("steps", last["at"]), 0)]
        cells += [spread(last["loss"], 3), spread(last["accuracy"], 1, 100)]
        if timed:
            base = {row["seed"]: row for row in found[framework, "synchronous"]}
            ratios = [base[row["seed"]]["curves"]["seconds"][-1] for row in same]
            ratios = [a / b for a, b in zip(ratios, last["seconds"], strict=True)]
            cells += [spread(last["seconds"], 1), spread(ratios, 2)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def plot(rows: list[Row], path: Path, panels: list[tuple[str, str, str, str]]) -> None:
    """Draw panels of (framework, x, y, title): each method's line and its range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, all_axes = plt.subplots(1, len(panels), figsize=(12, 4.6), squeeze=False)
    names = list(dict.fromkeys(row["who"] for row in rows))
    for axes, (wanted, x, y, title) in zip(all_axes[0], panels, strict=True):
        for (framework, who), same in groups(rows).items():
            if wanted not in (framework, "all"):
                continue
            style = {"color": f"C{names.index(who)}", "linestyle": "-"}
            if wanted == "all" and framework == "keras":
                style = {"color": "black", "linestyle": "--"}
            xs, ys = (
                list(zip(*(each["curves"][name] for each in same), strict=True)) for name in (x, y)
            )
            middle = [mean(each) for each in xs]
            axes.plot(middle, [mean(each) for each in ys], label=f"{framework}, {who}", **style)
            low, high = ([f(each) for each in ys] for f in (min, max))
            axes.fill_between(middle, low, high, color=style["color"], alpha=0.15, linewidth=0)
        axes.set(title=title, xlabel={"at": "epoch", "seconds": "seconds"}[x], ylabel=f"test {y}")
        if y == "loss":
            axes.set_yscale("log")
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def section(rows: list[Row], timed: bool, plot_name: str) -> list[str]:
    """Return a section: commands with their durations, table and plot."""
    walls: dict[str, list[float]] = {}
    for row in rows:
        walls.setdefault(row["command"].rsplit(" ", 1)[0], []).append(row["wall_s"])
    lines = ["", f"## {rows[0]['title'][0].upper() + rows[0]['title'][1:]}", ""]
    lines += [f"    {stem} SEED    # {spread(each, 0)} s" for stem, each in walls.items()]
    return [*lines, "", *table(rows, timed), "", f"![curves]({plot_name})", ""]


def show(folder: Path) -> None:
    """Write digits.md and the plots beside digits.json."""
    report = json.loads((folder / "digits.json").read_text())
    large, hierarchical = (
        [row for row in report["rows"] if row["title"] == title]
        for title in (digits.LARGE, digits.HIERARCHICAL)
    )
    busy = [row["busy_share_before"] for row in report["rows"]]
    text = ["# The examples on handwritten digits, full runs", "", INTRODUCTION]
    text += ["", f"{report['date']}, {report['cores']} cores ({report['processor']}), commit "]
    text[-1] += f"{report['commit']}; share of the cores that others used before a run: "
    text[-1] += f"{spread(busy, 2)}."
    versions = {k: v for row in report["rows"] for k, v in row["versions"].items()}
    text[-1] += " " + ", ".join(f"{name} {each}" for name, each in versions.items()) + "."
    text += [*section(large, False, "digits-large-batch.png"), ABOUT_LARGE]
    text += [*section(hierarchical, True, "digits-hierarchical.png"), ABOUT_HIERARCHICAL]
    (folder / "digits.md").write_text("\n".join(text) + "\n")
    panels = [("all", "at", y, "mean and range over seeds") for y in ("loss", "accuracy")]
    plot(large, folder / "digits-large-batch.png", panels)
    panels = [(f, "seconds", "loss", "4 processes, mean and range") for f in ("torch", "keras")]
    plot(hierarchical, folder / "digits-hierarchical.png", panels)
