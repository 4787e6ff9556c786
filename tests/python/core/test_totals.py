"""What a rank counts in its flight recorder, and what its script shows there (docs/watching.md).

Push tier, 4 s.
"""

from __future__ import annotations

import json
from pathlib import Path

import mpirun
import pytest

from hororing._engine import recorder

RANK = """
import json, os, time
import numpy as np
import hororing.numpy as hvd
from hororing._engine import recorder
from hororing.extension import show

def totals():
    return recorder.read(recorder.find(os.getpid())).totals

show(loss=1.0)  # before init: nothing happens
hvd.init()
for step in range(23):
    if step == 3:  # the names are known, and have been repeated
        before = totals()
    time.sleep(0.05 * (hvd.rank() == 1))
    for handle in [hvd.allreduce_async(np.ones(1000, np.float32), name=n) for n in ("a", "b")]:
        hvd.synchronize(handle)
    show(step, loss=0.5 / (step + 1), samples=8 * step, not_a_number=float("nan"))
after = totals()
found = {name: after[name] - before[name] for name in after}
show(7, **{f"metric {i}": i for i in range(100)})
seen = recorder.read(recorder.find(os.getpid())).shown
print(json.dumps([found, seen]))
hvd.shutdown()
"""


def test_a_rank_counts_steps_bytes_and_waits_and_its_script_shows_numbers(tmp_path: Path):
    (tmp_path / "rank.py").write_text(RANK)
    job = mpirun.run(tmp_path / "rank.py", 2)
    assert job.returncode == 0, job.report()
    (first, shown), (second, _) = (json.loads(each.splitlines()[-1]) for each in job.outputs)
    for totals in (first, second):
        assert totals["steps"] == 20
        assert totals["requests"] == totals["tensors"] == 40
        assert 20 <= totals["batches"] <= 40
        assert totals["bytes_shm_direct"] == 20 * 2 * 4000
        assert totals["step_began_at_ns"] > 20 * 50e6
        assert totals["batch_began_at_ns"] == 0
        assert 0 < totals["batch_ns"] < 10e9
    # Rank 1 is late by 50 ms in each step; rank 0 waits for it, asleep in its request.
    assert first["waited_ns"] > second["waited_ns"] + 20 * 30e6
    assert first["blocked_ns"] > 20 * 40e6
    # What has no room is left out.
    values = shown["values"]
    assert shown["step"] == 7
    assert values["loss"] == pytest.approx(0.5 / 23)
    assert values["samples"] == 8 * 22
    assert values["not_a_number"] != values["not_a_number"]
    assert len(values) + shown["left_out"] == 103
    assert shown["left_out"] > 0


def test_what_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="low"):
        recorder.show(loss="low")  # type: ignore[arg-type]
