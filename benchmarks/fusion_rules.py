"""What a step of training waits for its gradients, by rule of fusion: milliseconds.

    mpirun -np 2 python benchmarks/fusion_rules.py

The backward pass is a pause before each of so many gradients; what is measured is the time from
the last gradient to the last sum. A slow network makes the difference: several hosts, or pretend
ones, and HORORING_TRANSPORT=mpi.

    ready    HORORING_FUSION=ready: what is ready when the network is free
    plan     HORORING_FUSION=plan, once it is learned
    tensor   each gradient by itself
    one      one bucket: a grouped allreduce after the last gradient
    tuned    HORORING_AUTOTUNE=1, once it has settled (only with --tuned, which takes its time)

The rules take turns. Medians and 10th to 90th percentile over all steps, slowest rank.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np

import hororing.numpy as hvd

RULES = {
    "ready": {},
    "plan": {"HORORING_FUSION": "plan"},
    "tensor": {"HORORING_FUSION": "0"},
    "one": {},
    "tuned": {"HORORING_AUTOTUNE": "1", "HORORING_AUTOTUNE_STEPS_PER_SAMPLE": "3"},
}


def step(gradients: list[np.ndarray], pause_s: float, rule: str) -> float:
    """Seconds from the last gradient to the last sum."""
    hvd.barrier()
    handles = []
    begin = time.perf_counter()
    for i, gradient in enumerate(gradients):
        time.sleep(max(0.0, begin + (i + 1) * pause_s - time.perf_counter()))
        if rule != "one":
            handles.append(hvd.allreduce_async_(gradient, op=hvd.Sum, name=f"gradient{i}"))
    last = time.perf_counter()
    if rule == "one":
        hvd.grouped_allreduce_(gradients, op=hvd.Sum, name="gradients")
    for handle in handles:
        hvd.synchronize(handle)
    return time.perf_counter() - last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=60)
    parser.add_argument("--bytes", type=int, default=20_000, help="of each, on average; float32")
    parser.add_argument("--pause-ms", type=float, default=1.0, help="before each")
    parser.add_argument("--steps", type=int, default=20, help="measured, in a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tuned", action="store_true")
    args = parser.parse_args()
    shares = np.random.default_rng(1).lognormal(0, 1, args.tensors)
    sizes = np.maximum(1, args.bytes / 4 * args.tensors * shares / shares.sum()).astype(int)
    times: dict[str, list[float]] = {rule: [] for rule in RULES if rule != "tuned" or args.tuned}
    plans: list[list[int]] = []
    counts: list[tuple[int, int]] = []
    for _ in range(args.turns):
        for rule, measured in times.items():
            os.environ.update(RULES[rule])
            hvd.init()
            gradients = [np.zeros(size, np.float32) for size in sizes]
            for _ in range(200 if rule == "tuned" else 20):
                step(gradients, args.pause_ms * 1e-3, rule)
            mine = [step(gradients, args.pause_ms * 1e-3, rule) for _ in range(args.steps)]
            measured.extend(hvd.allreduce(np.array(mine), op=hvd.Max, name="slowest"))
            if rule == "plan":
                now = hvd.statistics()
                plans.append([len(bucket) for bucket in now["plan"]])
                counts.append((now["plans_made"], now["plan_departures"]))
            rank, ranks = hvd.rank(), hvd.size()
            hvd.shutdown()
            for name in RULES[rule]:
                del os.environ[name]
    if rank:
        return
    print(f"{ranks} ranks, {args.tensors} tensors of {sizes.sum() * 4 / 1e6:.1f} MB together")
    print(f"rule    median ms   p10   p90\n{'-' * 30}")
    for rule, measured in times.items():
        low, median, high = np.percentile(np.array(measured) * 1e3, [10, 50, 90])
        print(f"{rule:8}{median:8.2f}{low:8.2f}{high:7.2f}")
    print(f"tensors in the buckets of the plan, at the end of each turn: {plans}")
    print(f"plans made, steps that departed: {counts}")


if __name__ == "__main__":
    main()
