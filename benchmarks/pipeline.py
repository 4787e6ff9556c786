"""What the input pipeline saves: milliseconds per step whose parts sleep; and what it costs.

    python benchmarks/pipeline.py

    serial      reading, decoding and training one after the other, in this process
    pipeline    a process for reading, one for decoding, training here (hororing.data.pipeline)
    transfer    batches of --mib MiB through one ring, no sleep: copied out (held=0) or not (held=1)
    normalize   images of 224 x 224 x 3 to float16 in four channels: by table, by NumPy's arithmetic

The kinds take turns. Medians, and 10th to 90th percentile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hororing.data.normalize import Normalize
from hororing.data.pipeline import Pipeline

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def sleeping(ms: float) -> Callable[[Any], Any]:
    def stage(item: Any) -> Any:
        time.sleep(ms / 1000)
        return item

    return stage


def serially(items: range, ms: list[float]) -> Iterator[Any]:
    for item in items:
        yield sleeping(ms[1])(sleeping(ms[0])(item))


def steps(results: Iterator[Any], train: Callable[[Any], Any]) -> list[float]:
    """Milliseconds of each step but the first, which fills the pipeline."""
    times = []
    for result in results:
        train(result)
        times.append(time.perf_counter())
    return list(np.diff(times) * 1000)


def show(name: str, times: list[float], unit: str) -> None:
    low, median, high = np.percentile(times, [10, 50, 90])
    print(f"{name:22} {median:9.2f} {unit}  ({low:.2f} to {high:.2f}; mean {np.mean(times):.2f})")


def overlap(args: argparse.Namespace) -> None:
    train = sleeping(args.ms[2])
    times: dict[str, list[float]] = {"serial": [], "pipeline": []}
    with Pipeline(sleeping(args.ms[0]), sleeping(args.ms[1])) as pipeline:
        list(pipeline(range(3)))  # the processes are there
        for _ in range(args.turns):
            items = range(args.steps)
            times["serial"] += steps(serially(items, args.ms), train)
            times["pipeline"] += steps(pipeline(items), train)
    for name, each in times.items():
        show(name, each, "ms per step")


def transfer(args: argparse.Namespace) -> None:
    batch = np.ones(int(args.mib * 2**20), np.uint8)
    times: dict[int, list[float]] = {0: [], 1: []}
    with Pipeline(lambda item: batch) as pipeline:
        for _ in range(args.turns):
            for held, each in times.items():
                each += steps(pipeline(range(args.steps), held=held), lambda result: None)
    for held, each in times.items():
        show(f"transfer, held={held}", each, f"ms per {args.mib:g} MiB")


def normalizing(args: argparse.Namespace) -> None:
    normalize = Normalize(MEAN, STD)
    images = np.random.default_rng(0).integers(0, 256, (16, 224, 224, 3), np.uint8)
    scale, shift = normalize.scale.astype(np.float32), normalize.shift.astype(np.float32)

    def arithmetic(images: Any) -> Any:
        result = np.zeros((*images.shape[:-1], 4), np.float16)
        result[..., :3] = (images * scale + shift).astype(np.float16)
        return result

    times: dict[str, list[float]] = {"table": [], "arithmetic": []}
    for _ in range(max(3, args.turns)):
        for name, function in (("table", normalize), ("arithmetic", arithmetic)):
            begin = time.perf_counter()
            function(images)
            times[name].append((time.perf_counter() - begin) / len(images) * 1e6)
    for name, each in times.items():
        show(f"normalize, {name}", each, "us per image")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ms", type=float, nargs=3, default=[30, 30, 30], help="read decode train")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--mib", type=float, default=4.6, help="32 images of 8 bits")
    args = parser.parse_args()
    for part in (overlap, transfer, normalizing):
        part(args)


if __name__ == "__main__":
    main()
