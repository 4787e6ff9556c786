"""Pictures of a timeline: two training steps of three ranks, in the second of which rank 1 is late.

    hororun -np 3 python benchmarks/timeline_plot.py --record    # results/timeline.json
    python benchmarks/timeline_plot.py                           # docs/timeline*.png

timeline.png is drawn here and shows the second step. timeline-viewer.png is a picture of Chrome's
trace viewer (chrome://tracing; tests/python/support/timeline_viewer.py finds its parts).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib
import torch

import hororing.torch as hvd

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks/results/timeline.json"

COLORS = {"HOOK": "#5b8db8", "NEGOTIATE": "#dddddd", "ALLREDUCE": "#f2a65a", "PACK": "#c8553d",
          "REDUCE": "#7a1f1f", "UNPACK": "#c8553d"}  # fmt: skip
Span = tuple[str, float, float, str]  # stage, begin and length in ms, tensor


def record(timeline: Path) -> None:
    """Train a small network with six layers of 4 MiB for four steps; record the last two."""
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=((f"layer{name}", each) for name, each in model.named_parameters()),
    )
    for step in range(4):
        if step == 2:
            hvd.start_timeline(str(timeline))
        hvd.barrier()
        loss = model(torch.ones(16, 1024)).square().mean()
        if step == 3 and hvd.rank() == 1:
            time.sleep(0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    hvd.stop_timeline()
    hvd.barrier()  # the first rank that ends its script ends the job


def spans(events: list[dict[str, Any]], pid: int) -> list[Span]:
    """Return the spans of one rank, ordered by begin."""
    found, begun = [], {}
    for event in events:
        if event["pid"] != pid or event["ph"] not in "Xbe":
            continue
        stage, at = event["name"].partition("_")[0], event["ts"] / 1e3
        tensor = event.get("args", {}).get("tensor", "")
        if event["ph"] == "X":
            found.append((stage, at, event["dur"] / 1e3, tensor))
        elif event["ph"] == "b":
            begun[event["id"]] = (at, tensor)
        elif event["id"] in begun:
            begin, tensor = begun.pop(event["id"])
            found.append((stage, begin, at - begin, tensor))
    return sorted(found, key=lambda span: span[1])


def draw(events: list[dict[str, Any]], picture: Path) -> None:
    """Draw a panel per rank: hooks, waits for the other ranks, and allreduces."""
    pids = sorted({event["pid"] for event in events})
    # The second step begins with the second hook of the last layer, on the first rank that runs it.
    last = "layer5.weight"
    hooks = [[x for x in spans(events, pid) if x[0] == "HOOK" and last in x[3]] for pid in pids]
    first = min(found[-1][1] for found in hooks) - 1
    figure, panels = plt.subplots(len(pids), 1, figsize=(9, 1.9 * len(pids)), sharex=True)
    for axes, pid in zip(panels, pids, strict=True):
        seen = [span for span in spans(events, pid) if span[1] >= first]
        waiting = [span for span in seen if span[0] == "NEGOTIATE"]
        for row, (stage, begin, length, tensor) in enumerate(waiting):
            axes.barh(1 + row, length, 0.9, left=begin - first, color=COLORS[stage])
            axes.text(begin - first + length, 1 + row, f" {tensor}", va="center", fontsize=5.5)
        below = 2.5 + len(waiting)
        for stage, begin, length, _ in seen:
            if stage in COLORS and stage != "NEGOTIATE":
                row, height = (-1, 2) if stage == "HOOK" else (below, 1.8)
                wide = max(length, 0.08)  # a pixel at least
                axes.barh(row, wide, height, left=begin - first, color=COLORS[stage])
        places = [-1, below / 2, below]
        axes.set_yticks(places, ["gradient hook", "waits for\nother ranks", "allreduce"])
        axes.tick_params(labelsize=7)
        axes.set_ylim(below + 1.5, -2.5)
        axes.set_title(f"rank {pid - 1}", fontsize=9, loc="left")
        axes.grid(axis="x", alpha=0.3)
        axes.margins(x=0.1)  # room for the labels
    panels[-1].set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="on three ranks; draw nothing")
    if parser.parse_args().record:
        hvd.init()
        with tempfile.TemporaryDirectory() as folder:
            timeline = Path(folder, "timeline.json")
            record(timeline)
            if hvd.rank() == 0:
                events = json.loads(timeline.read_text())
                RECORD.write_text("[" + ",\n".join(map(json.dumps, events)) + "]\n")
        return
    draw(json.loads(RECORD.read_text()), ROOT / "docs/timeline.png")
    sys.path.insert(0, str(ROOT / "tests/python"))
    import timeline_viewer

    timeline_viewer.screenshot(RECORD, ROOT / "docs/timeline-viewer.png")


if __name__ == "__main__":
    main()
