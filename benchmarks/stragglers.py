"""The cost of stragglers in synchronous, local and hierarchical SGD: predicted and measured.

    python benchmarks/stragglers.py simulate            # half a minute; 64, 128 and 256 ranks
    mpirun -np 4 python benchmarks/stragglers.py measure
    mpirun -np 8 python benchmarks/stragglers.py measure
    python benchmarks/stragglers.py show                # Markdown and plots of the results

Simulated: ranks work for 55 ms, sometimes for 1 s longer, and wait for one another when they
average (hororing/toolkit/stragglers/simulator.py). Averaging costs a ring of 45 MB between hosts of
4 ranks at 32 Gbit/s. The published ranges are those of PyTorch's article on hierarchical SGD (Meta
and Cruise). It does not describe its stragglers, or which periods belong to which number, so our
figures are a bracket, not a reproduction.

Measured: real processes sleep 20 ms and, with probability 10 %, another 200 ms (a sleep needs no
core, so 2 cores are enough for 8 ranks). Then they make a step of toolkit.torch.optim's
HierarchicalSGD on 1 MiB of weights. "Synchronous" averages the weights after every step. The plans
take turns on the same random delays. "Ideal" is the simulator's time for the same delays, with
steps and averages that cost nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import record

from hororing.toolkit.stragglers import StragglerInjector, replay
from hororing.toolkit.stragglers.simulator import ring_seconds

RESULTS = Path(__file__).parent / "results"
SPAN = "{:.2f}-{:.2f}"


class Plan(NamedTuple):
    """How ranks average: levels {period: ranks in a group}, and ranks that average gradients."""

    levels: Mapping[int, int]
    gradient_group: int = 1


# ---------------------------------------------------------------------------------------------
# Simulated

STEP_S, DELAY_S, HOST = 0.055, 1.0, 4
PUBLISHED = {64: (2.08, 2.45), 128: (2.57, 2.68), 256: (2.63, 3.25)}
CASES = {  # ranks, and the probability of a delay
    "64 ranks": (64, 0.02),
    "128 ranks": (128, 0.01),
    "256 ranks": (256, 0.01),
}


def plans(ranks: int, gradient_group: int) -> dict[str, Plan]:
    """Return the plans that are compared with synchronous training."""
    levels = {
        "local SGD 2": {2: ranks},
        "HSGD {2: 16, 8: all}": {2: 16, 8: ranks},
        "HSGD {2: 8, 8: all}": {2: 8, 8: ranks},
        "HSGD {4: 16, 8: all}": {4: 16, 8: ranks},
        "local SGD 8": {8: ranks},
    }
    return {name: Plan(each, gradient_group) for name, each in levels.items()}


def cost_of_averaging(group: int) -> float:
    return ring_seconds(group, 45e6, 32e9 / 8, ranks_per_host=HOST)


def speed_ups(ranks: int, delays: Callable[[int], np.ndarray], seeds: int) -> list[dict[str, Any]]:
    """Return each plan's speed-up over synchronous training: mean and range over seeds."""
    found: dict[tuple[str, bool], list[float]] = {}
    for seed in range(seeds):
        durations = STEP_S + delays(seed)
        synchronous = replay(durations, {1: ranks}, cost=cost_of_averaging)
        for group in (1, HOST):
            for name, (levels, gradients) in plans(ranks, group).items():
                seconds = replay(
                    durations, levels, gradient_group=gradients, cost=cost_of_averaging
                )
                found.setdefault((name, group > 1), []).append(synchronous / seconds)
    return [
        {
            "who": name,
            "gradients_in_host": in_host,
            "speed_up": round(mean(factors), 3),
            "lowest": round(min(factors), 3),
            "highest": round(max(factors), 3),
        }
        for (name, in_host), factors in found.items()
    ]


def simulate(steps: int, seeds: int) -> dict[str, Any]:
    rows = []
    for case, (ranks, probability) in CASES.items():

        def random(seed: int, ranks: int = ranks, p: float = probability) -> np.ndarray:
            return StragglerInjector(p, DELAY_S, seed=seed).delays(steps, ranks)

        share = 1 - (1 - probability) ** ranks
        head = {"case": case, "ranks": ranks, "any_late": round(share, 3)}
        rows += [{**head, **row} for row in speed_ups(ranks, random, seeds)]

    def many(seed: int) -> np.ndarray:
        return StragglerInjector.thirty_percent(DELAY_S, seed=seed).delays(steps, 128)

    def fixed(seed: int) -> np.ndarray:
        return StragglerInjector(1.0, STEP_S, ranks=[seed]).delays(steps, 128)

    for case, delays in (("128 ranks, 30 % late", many), ("128 ranks, one always late", fixed)):
        rows += [
            {"case": case, "ranks": 128, **row} for row in speed_ups(128, delays, min(seeds, 2))
        ]
    return {
        "command": "python benchmarks/stragglers.py simulate",
        "steps": steps,
        "seeds": seeds,
        "rows": rows,
    }


# ---------------------------------------------------------------------------------------------
# Measured

SHORT_S, SLOW_S, OFTEN = 0.02, 0.2, 0.1
ELEMENTS = 1 << 18  # float32: 1 MiB


def measured_plans(size: int) -> dict[str, Plan]:
    return {
        "synchronous": Plan({1: size}),
        "local SGD 2": Plan({2: size}),
        "HSGD {2: 2, 8: all}": Plan({2: 2, 8: size}),
        "the same, gradients in pairs": Plan({2: 2, 8: size}, gradient_group=2),
        "local SGD 8": Plan({8: size}),
    }


def measure(steps: int, rounds: int, work_s: float) -> dict[str, Any] | None:
    """Run every plan on the same delays; rank 0 gets the result."""
    import torch

    import hororing.torch as hvd
    from hororing.toolkit.torch.optim import HierarchicalSGD

    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    size, rank = hvd.size(), hvd.rank()

    def train(plan: Plan, late: StragglerInjector, steps: int) -> float:
        weights = torch.nn.Parameter(torch.ones(ELEMENTS))
        optimizer = HierarchicalSGD(
            torch.optim.SGD([weights], lr=0.01),
            period_group_size_dict=plan.levels,
            gradient_groups=plan.gradient_group if plan.gradient_group > 1 else None,
        )
        hvd.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            late()
            time.sleep(work_s)
            optimizer.zero_grad()
            weights.mean().backward()
            optimizer.step()
        elapsed = time.perf_counter() - begin
        return float(hvd.allreduce(torch.tensor([elapsed]), op=hvd.Max, name="elapsed")[0])

    def delays(case: str, seed: int) -> StragglerInjector:
        scale = work_s / SHORT_S
        if case == "30 % late":
            return StragglerInjector.thirty_percent(SLOW_S * scale, seed=seed)
        if case == "one always late":
            return StragglerInjector(1.0, SHORT_S * scale, ranks=[size - 1])
        return StragglerInjector(OFTEN, SLOW_S * scale, seed=seed)

    for plan in measured_plans(size).values():
        train(plan, StragglerInjector(), 8)  # warms up
    cases = ["10 % late"] * rounds + ["30 % late", "one always late"]
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for seed, case in enumerate(cases):
        count = steps if case == cases[0] else steps // 2
        for name, plan in measured_plans(size).items():
            late = delays(case, seed)
            drawn = late.delays(count, size)
            ideal = replay(work_s + drawn, plan.levels, gradient_group=plan.gradient_group)
            seconds = train(plan, late, count)
            times.setdefault((case, name), []).append((seconds / count, ideal / count))
    rows = []
    for (case, name), found in times.items():
        taken, ideal = (mean(column) for column in zip(*found, strict=True))
        base = mean(first for first, _ in times[case, "synchronous"])
        base_ideal = mean(second for _, second in times[case, "synchronous"])
        rows.append(
            {
                "case": case,
                "who": name,
                "ms": round(taken * 1e3, 2),
                "ideal_ms": round(ideal * 1e3, 2),
                "of_ideal": round(max(a / b for a, b in found), 3),  # the worst round
                "speed_up": round(base / taken, 3),
                "ideal_speed_up": round(base_ideal / ideal, 3),
            }
        )
    command = f"mpirun -np {size} python benchmarks/stragglers.py measure --rounds {rounds}"
    head = {"command": command, **record.machine()}
    rounds_of = {"ranks": size, "steps": steps, "rounds": rounds, "work_s": work_s}
    return {**head, **rounds_of, "rows": rows} if rank == 0 else None


# ---------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["simulate", "measure", "show"])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="smoke test")
    parser.add_argument("--rounds", type=int, default=2, help="of other draws, when measuring")
    chosen = parser.parse_args(arguments)
    if chosen.part == "show":
        import stragglers_show

        return stragglers_show.show(chosen.out)
    if chosen.part == "simulate":
        report: dict[str, Any] | None = simulate(*((40, 2) if chosen.quick else (1000, 5)))
        name = "stragglers-simulated.json"
    else:
        report = measure(*((4, 1, 0.002) if chosen.quick else (120, chosen.rounds, SHORT_S)))
        name = f"stragglers-{report['ranks']}.json" if report else ""
    if report is not None:
        for row in report["rows"]:
            print(row, flush=True)
        (chosen.out / name).write_text(json.dumps(report, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
