"""Stragglers and hangs on seeded ranks are named rightly, and soon (docs/watching.md).

Full tier, 3 min. HORORING_TEST_SEED repeats a series.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import hororun_jobs
import mpirun
import pytest
from test_watching import Told

pytestmark = pytest.mark.full

SIZE, CASES = 4, 24
RANK = """
import os, sys, time
import numpy as np
import hororing.numpy as hvd

def disturbed(kind, delay_s):
    if kind == "sleep":
        time.sleep(delay_s)
    end = time.thread_time() + delay_s
    while kind == "compute" and time.thread_time() < end:
        pass
    while kind == "hang" and os.path.exists(sys.argv[1]):
        time.sleep(0.01)

hvd.init()
while True:
    time.sleep(0.02)
    try:
        kind, rank, delay_s = open(sys.argv[1]).read().split()
        if int(rank) == hvd.rank():
            disturbed(kind, float(delay_s))
    except (OSError, ValueError):  # none
        pass
    for handle in [hvd.allreduce_async(np.ones(50_000, np.float32), name=n) for n in "abcd"]:
        hvd.synchronize(handle)
"""
CAUSES = {"sleep": ("idle",), "compute": ("compute", "core"), "hang": ("idle",)}


def test_seeded_stragglers_and_hangs_are_named_rightly(tmp_path: Path):
    (tmp_path / "rank.py").write_text(RANK)
    disturbance = tmp_path / "disturbance"
    process = hororun_jobs.start(
        "--page", "0", "--grace", "1", "-np", str(SIZE),
        sys.executable, str(tmp_path / "rank.py"), str(disturbance),
    )  # fmt: skip
    assert process.stderr is not None
    told = Told(process.stderr.readline().split()[1])
    seed = mpirun.new_seed()
    draw = random.Random(seed)
    took: list[float] = []
    wrong: list[str] = []
    try:
        for number in range(CASES):
            quiet(told)
            kind = ("sleep", "compute", "hang")[number % 3]
            rank, delay_s = draw.randrange(SIZE), draw.uniform(0.06, 0.3)
            began = time.monotonic()
            (tmp_path / "new").write_text(f"{kind} {rank} {delay_s}")
            (tmp_path / "new").rename(disturbance)
            found = first(told, kind)
            took.append(time.monotonic() - began)
            disturbance.unlink()
            if found["ranks"] != [rank] or found["cause"] not in CAUSES[kind]:
                wrong.append(f"{kind} on rank {rank}, {delay_s:.2f} s: {found}")
    finally:
        process.terminate()
        process.communicate(timeout=60)
    took.sort()
    rightly = f"{CASES - len(wrong)} of {CASES} named rightly"
    print(f"seed {seed}: {rightly}; median {took[CASES // 2]:.1f} s, slowest {took[-1]:.1f} s")
    assert not wrong, f"seed {seed}: {wrong}"
    assert took[CASES // 2] < 3  # s; 2.0 on an idle machine


def quiet(told: Told) -> None:
    """Wait until nobody is late or missing, for two samples."""
    calm = 0
    end = time.monotonic() + 60
    while calm < 10 and time.monotonic() < end:
        calm = calm + 1 if not guilty(told) else 0
        time.sleep(0.2)


def guilty(told: Told) -> list[dict[str, Any]]:
    state = told.state()["state"]
    if not state or not state["step_s"] or len(state["ranks"]) < SIZE:
        return [{}]
    return [each for each in state["findings"] if each["kind"] in ("late", "waiting", "hang")]


def first(told: Told, kind: str) -> dict[str, Any]:
    """Wait for the first finding, of a straggler or of a hang."""
    end = time.monotonic() + 60
    kinds = ("waiting", "hang") if kind == "hang" else ("late",)
    while True:
        found = [each for each in guilty(told) if each.get("kind") in kinds]
        if found:
            return found[0]
        assert time.monotonic() < end, kind
        time.sleep(0.05)
