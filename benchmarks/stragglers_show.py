"""Tables and plots of the results of benchmarks/stragglers.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import stragglers

Report = dict[str, Any]


def predicted_table(report: Report) -> list[str]:
    """Return a table of speed-ups over synchronous training, with the published ones."""
    rows = report["rows"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    names = list(dict.fromkeys(row["who"] for row in rows))
    lines = [
        "| predicted speed-up | gradients averaged in hosts of 4 | " + " | ".join(cases) + " |",
        "|---|---|" + "---:|" * len(cases),
    ]
    for in_host in (False, True):
        for name in names:
            cells = [
                f"{row['speed_up']:.2f} ({row['lowest']:.2f}-{row['highest']:.2f})"
                for case in cases
                for row in rows
                if (row["case"], row["who"], row["gradients_in_host"]) == (case, name, in_host)
            ]
            lines.append(f"| {name} | {'yes' if in_host else 'no'} | " + " | ".join(cells) + " |")
    published = [
        stragglers.SPAN.format(*stragglers.PUBLISHED[ranks]) if case in stragglers.CASES else ""
        for case in cases
        for ranks in [next(row["ranks"] for row in rows if row["case"] == case)]
    ]
    lines.append("| **published, HSGD** | not told | " + " | ".join(published) + " |")
    return lines


def measured_table(report: Report) -> list[str]:
    """Return a table of the time per step and the ideal, in ms."""
    lines = [
        "| stragglers | averaging | ms per step | ideal | worst of ideal | speed-up | ideal |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        lines.append(
            f"| {row['case']} | {row['who']} | {row['ms']:.1f} | {row['ideal_ms']:.1f} | "
            f"{row['of_ideal']:.2f}x | {row['speed_up']:.2f}x | {row['ideal_speed_up']:.2f}x |"
        )
    return lines


def plot_predicted(report: Report, path: Path) -> None:
    """Plot bars for the three sizes, and the published ranges as bands."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in report["rows"] if row["case"] in stragglers.CASES]
    names = list(dict.fromkeys(row["who"] for row in rows))
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axes, in_host in zip(panels, (False, True), strict=True):
        for place, case in enumerate(stragglers.CASES):
            for number, name in enumerate(names):
                row = next(
                    row
                    for row in rows
                    if (row["case"], row["who"], row["gradients_in_host"]) == (case, name, in_host)
                )
                spread = [
                    [row["speed_up"] - row["lowest"]],
                    [row["highest"] - row["speed_up"]],
                ]
                axes.bar(
                    place + (number - 2) * 0.16, row["speed_up"], 0.15, yerr=spread, capsize=2,
                    color=f"C{number}", label=name if place == 0 else None,
                )  # fmt: skip
            low, high = stragglers.PUBLISHED[row["ranks"]]
            axes.fill_between(
                [place - 0.42, place + 0.42], low, high, color="black", alpha=0.2,
                label="published, HSGD" if place == 0 else None,
            )  # fmt: skip
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(stragglers.CASES)), list(stragglers.CASES))
        axes.set_title("gradients averaged in each host" if in_host else "gradients not averaged")
    panels[0].set_ylabel("predicted speed-up over synchronous")
    panels[1].legend(fontsize=8, loc="upper left")
    figure.suptitle("simulated: 55 ms steps, 1 s delays, 2 % / 1 % / 1 % of ranks per step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_measured(reports: list[Report], path: Path) -> None:
    """Plot the time per step of real processes, and the ideal for the same delays."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(reports), figsize=(11, 4.5), squeeze=False)
    for axes, report in zip(panels[0], reports, strict=True):
        rows = [row for row in report["rows"] if row["case"] == "10 % late"]
        places = range(len(rows))
        axes.bar([p - 0.2 for p in places], [row["ms"] for row in rows], 0.38, label="measured")
        axes.bar(
            [p + 0.2 for p in places], [row["ideal_ms"] for row in rows], 0.38, color="lightgray",
            label="ideal replay of the same draws",
        )  # fmt: skip
        axes.set_xticks(places, [row["who"] for row in rows], rotation=20, ha="right", fontsize=8)
        axes.set_title(f"{report['ranks']} processes")
        axes.legend(fontsize=8)
    panels[0][0].set_ylabel("ms per step")
    figure.suptitle("measured: sleeps of 20 ms, 10 % of them 200 ms longer")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def show(folder: Path) -> None:
    """Write stragglers.md and the plots beside the results."""
    text = [
        "# What stragglers cost",
        "",
        "Made by `python benchmarks/stragglers.py show`; its docstring says how.",
    ]
    predicted = folder / "stragglers-simulated.json"
    if predicted.exists():
        report = json.loads(predicted.read_text())
        text += [
            *("", "## Predicted", ""),
            f"`{report['command']}`: {report['steps']} steps, mean and range over "
            f"{report['seeds']} seeds. Nothing of this ran on so many ranks.",
            *("", *predicted_table(report)),
            *("", "![predicted](stragglers-simulated.png)"),
        ]
        plot_predicted(report, folder / "stragglers-simulated.png")
    files = [folder / f"stragglers-{ranks}.json" for ranks in range(2, 65)]
    measured = [json.loads(file.read_text()) for file in files if file.exists()]
    for report in measured:
        text += [
            *("", f"## Measured, {report['ranks']} processes", ""),
            f"`{report['command']}`, {report['date']}, {report['cores']} cores, busy share before "
            f"{report['busy_share_before']}; {report['steps']} steps, means of {report['rounds']} "
            "rounds with other draws (30 % and one always late: one round of half as many steps).",
            *("", *measured_table(report)),
        ]
    if measured:
        text += ["", "![measured](stragglers-measured.png)"]
        plot_measured(measured, folder / "stragglers-measured.png")
    (folder / "stragglers.md").write_text("\n".join(text) + "\n")
