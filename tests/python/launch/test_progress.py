"""What `hororun --progress` prints."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hororun_jobs import run

from hororing.hororun.host.output import Output
from hororing.hororun.job.beside import Later
from hororing.watch import job as job_module
from hororing.watch.job import Job
from hororing.watch.progress import Progress


def state(step: int, late_s: float = 0.0, pids: tuple[int, int] = (10, 11)) -> dict[str, Any]:
    """Two ranks after so many steps of 0.1 s, of which the first waits for a half."""
    ranks = [
        {
            "rank": rank, "pid": pid, "sampled_by": "here",
            "late_s": late_s * rank, "waited_s": 0.05 * (1 - rank),
            "totals": {"steps": step, "waited_ns": int(step * 0.05e9) * (1 - rank)},
        }
        for rank, pid in enumerate(pids)
    ]  # fmt: skip
    findings = [{"kind": "late", "ranks": [1], "text": "rank 1 is late"}] if late_s else []
    usual = {"usual_step_s": None, "samples_per_s": None}
    return {"ranks": ranks, "step_s": 0.1, **usual, "findings": findings}


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
    progress.end(processes=5)  # three of them before the first look
    assert said[1][1].endswith(", 3 restarts")


def test_without_the_flag_only_what_lasts_is_told_and_seldom(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    said: list[tuple[float, str]] = []
    progress = Progress(lambda text: said.append((now, text)), None)

    def look(until: int, late_s: float = 0.05, slower: float = 0.0) -> list[tuple[float, str]]:
        nonlocal now
        said.clear()
        while now < until:
            seen = state(int(10 * now), late_s)
            if slower:
                seen["findings"].append({"kind": "slower", "ranks": [], "text": "steps take 2 s"})
                seen["usual_step_s"] = 0.1 / slower
            progress.look(seen)
            now += 1
        return [*said]

    assert look(59) == []  # ranks warm up
    progress.end()
    assert said == []  # a short job
    assert look(5000) == [(60, "rank 1 is late"), (660, "rank 1 is late"), (4260, "rank 1 is late")]
    assert look(5100, late_s=0.019) == []  # less than a fifth of a step
    for _ in range(3):  # evaluations on one rank, checkpoints: they pass
        assert look(int(now) + 60, late_s=0.0) + look(int(now) + 29) == []
    assert look(int(now) + 100, late_s=0.0, slower=1.4) == []
    begin = now
    assert look(int(now) + 100, late_s=0.0, slower=1.6) == [(begin + 30, "steps take 2 s")]
    progress.end()
    assert said[-1][1].startswith("the job took 1 h 32 min, about ")


def test_only_steps_that_move_as_many_bytes_are_compared():
    job = Job("x")

    def slower(step_s: float, step_bytes: float) -> list[str]:
        job.points.clear()
        parts = dict.fromkeys((*job_module._PARTS, *job_module._KERNEL), 0.0)
        at_first = parts | {"step_s": 0.1, "step_bytes": 4e6, "own_s": 0.1}
        for second in range(40):
            changed = {"step_s": step_s, "step_bytes": step_bytes, "own_s": step_s}
            job.points.append(at_first | {"at": second} | (changed if second >= 30 else {}))
        return [each.text for each in job._slower(job._usual())]

    (text,) = slower(0.2, 3.9e6)
    assert "steps take 200.0 ms, 100.0 ms in the last minutes: ranks take longer outside" in text
    assert slower(0.2, 8) == []  # an evaluation, which sums a number
    assert slower(0.12, 4e6) == []


def test_the_process_beside_hororun_starts_late_and_only_for_few_hosts():
    def later(hosts: int) -> str:
        """What it is told."""
        output = Output({}, 2, tag=True)
        beside = Later(["time"], output)
        beside.about("abc", [f"host{n}" for n in range(hosts)])
        assert output.due_s() is not None
        output.later = 0.0, output.later[1]  # type: ignore[index]
        with tempfile.TemporaryFile() as file:
            process = SimpleNamespace(stdin=file, wait=lambda timeout: None)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("hororing.hororun.job.beside.start", lambda *_, **__: process)
                patch.setattr(os, "set_blocking", lambda *_: None)
                output.show_due()
            assert output.due_s() is None
            file.seek(0)
            return file.read().decode()

    assert later(2) == "job abc\nhost host0\nhost host1\n"
    assert later(17) == ""


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
