"""Draws docs/timeline.png: one training step of two ranks, of which rank 1 is late.

mpirun -np 2 python benchmarks/timeline_plot.py docs/timeline.png
"""

from __future__ import annotations

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

COLORS = {"HOOK": "#5b8db8", "NEGOTIATE": "#dddddd", "ALLREDUCE": "#f2a65a", "PACK": "#c8553d",
          "REDUCE": "#7a1f1f", "UNPACK": "#c8553d"}  # fmt: skip
Span = tuple[str, float, float, str]  # stage, begin and length in ms, tensor


def train(timeline: Path) -> None:
    """Three steps of a small network with eight layers of 4 MiB; the timeline has the last one."""
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=((f"layer{name}", each) for name, each in model.named_parameters()),
    )
    for step in range(3):
        if step == 2:
            hvd.start_timeline(str(timeline))
        hvd.barrier()
        loss = model(torch.ones(64, 1024)).square().mean()
        time.sleep(0.02 * hvd.rank())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    hvd.stop_timeline()
    hvd.barrier()  # the first rank that ends its script ends the job


def spans(events: list[dict[str, Any]], pid: int) -> list[Span]:
    """Those of one rank, by begin."""
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
    """A panel per rank: hooks, what waits for the other rank, and allreduces."""
    pids = sorted({event["pid"] for event in events})
    first = min(span[1] for pid in pids for span in spans(events, pid) if span[0] == "HOOK") - 1
    figure, panels = plt.subplots(len(pids), 1, figsize=(9, 2.2 * len(pids)), sharex=True)
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
        axes.set_yticks(places, ["gradient hook", "waits for\nthe other rank", "allreduce"])
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
    hvd.init()
    with tempfile.TemporaryDirectory() as folder:
        timeline = Path(folder, "timeline.json")
        train(timeline)
        if hvd.rank() == 0:
            draw(json.loads(timeline.read_text()), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
