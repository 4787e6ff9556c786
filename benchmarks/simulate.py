"""Training steps on 8 to 2,048 ranks: the real fusion planner and coordinator, a simulated network.

    make test-cpp && python benchmarks/simulate.py      # a minute; writes results/simulate*

Real: the fusion planner, the coordinator and its messages (csrc/, through the test module). "ready"
is a model of the engine's rule; "engine, ready" is what the coordinator decides, report by report
(engine_replay.py). Simulated: the network (network.py: alpha, beta, one NIC per host) and the times
of backward (replay.py). All ranks are equally fast. Efficiency is the time of a step without
communication over that with it: it grows with the batch per rank.

The simulation shows which algorithm and which fusion policy is best, from which scale latency
matters, what negotiation costs, and how the coordinator's work grows. It does not show stragglers,
congestion, or the speed of our data plane on hardware on which we have not measured it. The
published curves are for orientation; they were measured with other software and hardware.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sysconfig
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import engine_replay
import network
import numpy as np
import replay
import shapes
from network import RDMA, TCP, Network

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
OURS = "exchange"
# What the lines of a table vary; the rest is our algorithm, what is ready, and combined reports.
KEYS = {"algorithm": "algorithms", "policy": "policies", "negotiation": "negotiation"}
RANKS = [8, 16, 32, 64, 128, 256, 512, 1024, 2048]
CONTROL_RANKS = [*RANKS, 4096, 8192, 16384]


class Job(NamedTuple):
    """A model on a network, the time of a step without communication, and published results."""

    model: str
    network: Network
    step_s: float
    element_bytes: int
    note: str
    published: dict[str, list[tuple[int, float]]]


TENCENT = "Tencent 2018 (blog)"
TENCENT_PAPER = "Tencent 2018, as Sony's paper counts it"
HOROVOD = "Horovod 2018"
JOBS = [
    Job("ResNet-50", RDMA, 0.213, 2, "32 images per rank at 150 images/s, float16 (P40)", {
        TENCENT: [(1024, 0.99), (2048, 0.97)], TENCENT_PAPER: [(2048, 0.879)],
    }),
    Job("AlexNet", RDMA, 0.110, 2, "128 images per rank at 1,160 images/s, float16", {}),
    Job("ResNet-50", TCP, 0.320, 4, "64 images per rank at 200 images/s, float32 (P100)", {
        HOROVOD + ", Inception, ResNet-101": [(512, 0.90)],
    }),
    Job("VGG-16", TCP, 0.490, 4, "64 images per rank at 130 images/s, float32 (P100)", {
        HOROVOD: [(512, 0.68)],
    }),
    Job("BERT-base", RDMA, 0.160, 4, "32 sequences of 128 tokens per rank, float32", {}),
]  # fmt: skip


def load_core() -> ModuleType:
    """Return the test module, which `make test-cpp` builds."""
    name = "_testing" + sysconfig.get_config_var("EXT_SUFFIX")
    path = ROOT / "build" / "editable" / name
    if not path.exists():
        raise SystemExit(f"{name} is not built: make test-cpp builds it")
    spec = importlib.util.spec_from_file_location("_testing", path)
    assert spec is not None
    assert spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    return core


class Work(NamedTuple):
    """CPU seconds of the real negotiation, fitted: per rank, and per tensor of a rank."""

    report_s: float  # in the coordinator
    tensor_s: float
    host_report_s: float = 0.0  # in the first rank of a host, which combines its ranks' reports
    host_tensor_s: float = 0.0
    combined: int = 1  # number of ranks whose reports are combined


def coordinator_work(core: ModuleType, ranks: int = 512, combined: int = 1) -> Work:
    """Fit the real coordinator's work on cached reports of 1 to 256 tensors."""
    counts = [1, 4, 16, 64, 256]
    played = [core.play_negotiation(ranks, [[4096] * count], 6, combined)[1:] for count in counts]

    def fit(seconds: list[float]) -> tuple[float, float]:
        tensor_s, report_s = np.polyfit(counts, seconds, 1, w=1 / np.array(seconds))
        return max(0.0, float(report_s)), float(tensor_s)

    of_rank_0 = fit([min(step.work_ns for step in steps) / 1e9 / ranks for steps in played])
    if combined == 1:
        return Work(*of_rank_0)
    of_hosts = fit([min(step.host_ns for step in steps) / 1e9 / combined for steps in played])
    return Work(*of_rank_0, *of_hosts, combined)


def negotiation(net: Network, ranks: int, work: Work | None):
    """Return a function from a number of tensors to the seconds in which all ranks agree on them.

    Ranks report to rank 0, which answers them all; a rank handles its messages one after the other.
    If `work` is for combined reports, the ranks of another host report to its first rank, which
    forwards one report and passes on the answer. A message within a host counts as much as one
    between hosts, which is pessimistic. Without `work`, negotiation costs nothing.
    """
    per_host = min(net.ranks_per_host, ranks)
    message = 2 * net.message_overhead_s

    def seconds(tensors: int) -> float:
        if work is None:
            return 0.0
        counting = work.report_s + tensors * work.tensor_s
        if work.combined == 1:
            return 2 * net.outer_alpha_s + (ranks - 1) * (message + counting)
        hosts = ranks // per_host
        alpha = 2 * net.inner_alpha_s + 2 * net.outer_alpha_s * (hosts > 1)
        combining = work.host_report_s + tensors * work.host_tensor_s
        elsewhere = (per_host - 1) * message + per_host * combining
        senders = per_host - 1 + hosts - 1
        return alpha + elsewhere * (hosts > 1) + senders * message + (ranks - 1) * counting

    return seconds


def scaling(
    core: ModuleType, job: Job, ranks: list[int], combined: Work, flat: Work
) -> dict[str, Any]:
    """Return efficiencies by number of ranks: per algorithm, policy, and kind of negotiation."""
    step = replay.step_of(shapes.MODELS[job.model](), job.step_s, job.element_bytes)
    widening = 4 / job.element_bytes
    algorithms: dict[str, Callable[[int, float], float]] = {
        "ring": lambda n, nbytes: network.ring(job.network, n, nbytes),
        "rings of hosts": lambda n, nbytes: network.rings_of_hosts(job.network, n, nbytes),
        OURS: lambda n, nbytes: network.exchange(job.network, n, nbytes, widening),
    }

    def line(algorithm: str, policy: str, work: Work | None = combined) -> list[float]:
        found = []
        for count in ranks:
            args = (
                core,
                step,
                lambda nbytes, n=count: algorithms[algorithm](n, nbytes),
                negotiation(job.network, count, work),
            )
            if policy == engine_replay.POLICY:
                found.append(engine_replay.efficiency(*args))
            else:
                found.append(replay.efficiency(policy, *args))
        return found

    return {
        "job": f"{job.model}, {job.network.name}",
        "note": job.note,
        "source": job.network.source,
        "ranks": ranks,
        "published": job.published,
        "algorithms": {name: line(name, "ready") for name in algorithms},
        "policies": {name: line(OURS, name) for name in [*replay.POLICIES, engine_replay.POLICY]},
        "negotiation": {
            "combined per host": line(OURS, "ready"),
            "every rank reports to rank 0": line(OURS, "ready", flat),
            "free": line(OURS, "ready", None),
        },
    }  # fmt: skip


def control_plane(
    core: ModuleType, ranks: list[int], combined: int = 8, bursts: int = 8
) -> list[dict[str, Any]]:
    """Return the cost for rank 0 of a step of ResNet-50 in `bursts` equal parts: first and later.

    Each number of ranks has two cases: the reports of `combined` ranks of a host are combined, or
    every rank reports to rank 0.
    """
    sizes = replay.step_of(shapes.resnet50(), 1.0, 4).nbytes
    parts = [list(part) for part in np.array_split(sizes, bursts)]
    rows = []
    for count, together in itertools.product(ranks, (combined, 1)):
        first, *later = core.play_negotiation(count, parts, 3, together)
        for name, step in (("first", first), ("later", min(later, key=lambda s: s.work_ns))):
            rows.append({
                "ranks": count, "step": name, "ranks_per_message": together,
                "work_ms": step.work_ns / 1e6, "host_ms": step.host_ns / 1e6,
                "messages_in": step.reports, "bytes_in": step.report_bytes,
                "messages_out": step.agreements_sent,
                "bytes_out": step.agreement_bytes * (step.agreements_sent // step.agreements),
            })  # fmt: skip
    return rows


def markdown(report: dict[str, Any]) -> str:
    """Return the page: efficiencies at some numbers of ranks, and the control plane."""
    work, flat = report["coordinator"], report["coordinator_flat"]
    text = (
        "`python benchmarks/simulate.py`: the real fusion planner and coordinator over a simulated "
        "network. **Predictions under the stated assumptions, not measurements.** The coordinator "
        f"takes {1e9 * work['report_s']:.0f} ns per rank and {1e9 * work['tensor_s']:.0f} ns per "
        f"tensor of a rank if the reports of {work['combined']} ranks are combined (which takes "
        f"the first rank of their host {1e9 * work['host_report_s']:.0f} and "
        f"{1e9 * work['host_tensor_s']:.0f} ns), and {1e9 * flat['report_s']:.0f} and "
        f"{1e9 * flat['tensor_s']:.0f} ns if every rank reports to it (fitted to the real "
        "coordinator, on this machine)."
    )
    lines = ["# Simulated scaling", "", *textwrap.wrap(text, 120)]
    for each in report["scaling"]:
        shown = [n for n in each["ranks"] if n in (8, 64, 512, 1024, 2048)]
        text = f"{each['note']}; network: {each['source']}."
        lines += ["", f"## {each['job']}", "", *textwrap.wrap(text, 120), ""]
        lines += [f"| ranks | {' | '.join(map(str, shown))} |", "|---|" + "---:|" * len(shown)]
        for group in ("algorithm", "policy", "negotiation"):
            for name, line in each[KEYS[group]].items():
                cells = [f"{line[each['ranks'].index(n)]:.1%}" for n in shown]
                lines.append(f"| {group}: {name} | {' | '.join(cells)} |")
        for who, points in each["published"].items():
            known = {n: f"{value:.1%}" for n, value in points}
            lines.append(f"| published: {who} | {' | '.join(known.get(n, '') for n in shown)} |")
    text = (
        "The reports of 8 ranks of a host are combined, or every rank reports to rank 0. CPU ms of "
        "a host: of the first rank of a host, which combines the reports."
    )
    lines += ["", "## Rank 0's control plane in a step of ResNet-50, 8 bursts, real code", "",
              *textwrap.wrap(text, 120), "",
              "| ranks | step | ranks per message | CPU ms | CPU ms of a host | messages in | "
              "bytes in | messages out | bytes out |",
              "|---:|---|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for row in report["control_plane"]:
        lines.append(
            "| {ranks:,} | {step} | {ranks_per_message} | {work_ms:.2f} | {host_ms:.2f} | "
            "{messages_in:,} | {bytes_in:,} | "
            "{messages_out:,} | {bytes_out:,} |".format(**row)
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", default=str(RESULTS), help="folder")
    parser.add_argument("--quick", action="store_true", help="a few ranks")
    options = parser.parse_args(argv)
    begin = time.monotonic()
    core = load_core()
    combined, flat = coordinator_work(core, combined=8), coordinator_work(core)
    ranks = [8, 64] if options.quick else RANKS
    jobs = JOBS[:1] if options.quick else JOBS
    report = {
        "command": "python benchmarks/simulate.py",
        "coordinator": combined._asdict(),
        "coordinator_flat": flat._asdict(),
        "scaling": [scaling(core, job, ranks, combined, flat) for job in jobs],
        "control_plane": control_plane(core, ranks if options.quick else CONTROL_RANKS),
    }
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "simulate.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "simulate.md").write_text(markdown(report))
    print(markdown(report))
    print(f"{time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main()
