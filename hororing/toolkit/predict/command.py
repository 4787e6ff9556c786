"""``python -m hororing predict TIMELINE --ranks 8,64,256 --network 25Gbit --latency 20us``."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from typing import Any

from hororing.toolkit.predict.profile import read_profile
from hororing.toolkit.predict.report import Prediction, predict

_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def bits_per_s(text: str) -> float:
    """``25Gbit``, ``200 Mbit/s``."""
    found = re.fullmatch(r"([\d.]+)\s*([kmgt]?)bit(?:/s)?", text.strip(), re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no bandwidth such as 25Gbit")
    return float(found[1]) * _BITS[found[2].lower()]


def seconds(text: str) -> float:
    """``20us``, ``0.1ms``."""
    found = re.fullmatch(r"([\d.]+)\s*(s|ms|us|µs|ns)", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 20us")
    return float(found[1]) * _SECONDS[found[2]]


def numbers(text: str) -> list[int]:
    """``8,64,256``, in ascending order."""
    try:
        found = sorted({int(each) for each in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of ranks such as 8,64,256")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("timeline", help="of at least two ranks; what HORORING_TIMELINE wrote")
    parser.add_argument("--ranks", type=numbers, required=True, help="such as 8,64,256")
    parser.add_argument(
        "--network", type=bits_per_s, metavar="BANDWIDTH",
        help="between hosts, such as 25Gbit; default: as recorded (one host: a core for each rank)",
    )  # fmt: skip
    parser.add_argument(
        "--latency", type=seconds, default=0.0, help="of a message between hosts, such as 20us"
    )
    parser.add_argument("--ranks-per-host", type=int, help="default: as recorded")
    parser.add_argument(
        "--input-rate", type=float, metavar="SAMPLES",
        help="a second that the source of the data delivers to all ranks together; with --batch",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, help="samples of a rank in a recorded step")
    parser.add_argument("--plot", metavar="FILE", help="weak and strong scaling: .png, .pdf, .svg")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(chosen: argparse.Namespace) -> int:
    """Print the report. 1: the timeline or an argument does not serve."""
    try:
        found = predict(
            read_profile(chosen.timeline), chosen.ranks, bits_per_s=chosen.network,
            latency_s=chosen.latency, ranks_per_host=chosen.ranks_per_host,
            samples_per_s=chosen.input_rate, batch=chosen.batch,
        )  # fmt: skip
        print(json.dumps(found.as_dict(), indent=1) if chosen.json else found)
        if chosen.plot:
            plot(found, chosen.plot)
    except FileNotFoundError as error:
        print(f"{error}; did the job set HORORING_TIMELINE?", file=sys.stderr)
        return 1
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def plot(prediction: Prediction, path: str) -> None:
    """Draw weak and strong scaling; ModuleNotFoundError without matplotlib."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError:
        raise ModuleNotFoundError("--plot needs matplotlib: pip install matplotlib") from None
    ranks = [point.ranks for point in prediction.points]
    figure = figures.Figure(figsize=(8, 3.4), layout="constrained")
    weak, strong = figure.subplots(1, 2)
    times = [(p.step_s, p.low_s, p.high_s) for p in prediction.points]
    speed = [n * prediction.compute_s / t for n, (t, _, _) in zip(ranks, times, strict=True)]
    low = [n * prediction.compute_s / t for n, (_, _, t) in zip(ranks, times, strict=True)]
    high = [n * prediction.compute_s / t for n, (_, t, _) in zip(ranks, times, strict=True)]
    weak.plot(ranks, ranks, "--", color="0.6", label="ideal")
    weak.fill_between(ranks, low, high, alpha=0.25, label="80 % of the steps")
    weak.plot(ranks, speed, "o-", label="predicted")
    weak.set(title="Weak scaling: the same batch per rank", ylabel="speed, in ranks alone")
    ideal = [n / prediction.ranks for n in ranks]
    strong.plot(ranks, ideal, "--", color="0.6", label="ideal")
    strong.plot(ranks, [p.strong_speedup for p in prediction.points], "o-", label="predicted")
    strong.set(
        title="Strong scaling: the same batch in all",
        ylabel=f"speed-up over {prediction.ranks} recorded ranks",
    )
    for axes in (weak, strong):
        axes.set(xlabel="ranks", xscale="log", yscale="log", xticks=ranks)
        axes.set_xticks(ranks, [str(n) for n in ranks])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
