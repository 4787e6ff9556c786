"""What `hororun --progress` prints."""

from __future__ import annotations

import re
import sys
import time
from typing import Any

import pytest
from hororun_jobs import run

from hororing.watch.progress import Progress


def state(step: int, late_s: float = 0.0, pids: tuple[int, int] = (10, 11)) -> dict[str, Any]:
    """Two ranks after so many steps of 0.1 s, of which the first waits for a half."""
    ranks = [
        {
            "rank": rank, "pid": pid, "late_s": late_s * rank, "waited_s": 0.05 * (1 - rank),
            "totals": {"steps": step, "waited_ns": int(step * 0.05e9) * (1 - rank)},
        }
        for rank, pid in enumerate(pids)
    ]  # fmt: skip
    findings = [{"kind": "late", "ranks": [1], "text": "rank 1 is late"}] if late_s else []
    return {"ranks": ranks, "step_s": 0.1, "samples_per_s": None, "findings": findings}


def test_a_line_a_minute_and_who_is_late_for_long(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    said: list[tuple[float, str]] = []
    progress = Progress(lambda text: said.append((now, text)))
    for second in range(130):
        now = float(second)
        progress.look(state(10 * second, late_s=0.05 if second >= 70 else 0.0))
    assert said == [
        (60, "step 600, 10 steps/s, 25% waiting"),
        (100, "rank 1 is late"),  # after half a minute, and once
        (120, "step 1,200, 10 steps/s, 25% waiting, rank 1 late by 50.0 ms a step"),
    ]
    progress.look(state(1300, pids=(10, 12)))  # another process
    said.clear()
    progress.end()
    assert said[0][1] == (
        "the job took 2 min 9 s, about 1,300 steps, ranks waited for 25% of the time, mostly for "
        "rank 1, 1 restart"
    )


RANKS = """
import time
import numpy as np
import hororing.numpy as hvd
hvd.init()
for step in range(60):
    time.sleep(0.05)
    hvd.allreduce(np.ones(1), name="x")
"""


@pytest.mark.full
def test_a_job_says_at_its_end_what_it_took():
    done = run("-np", "2", "--progress", sys.executable, "-c", RANKS)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"hororun: [\d:]+ the job took \d+ s, about \d+ steps, ranks waited .*, 0 restarts\n",
        done.stderr,
    )
