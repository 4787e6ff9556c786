"""Random schedules, on 1 to 4 ranks: schedules.py. 10,000 collectives in all."""

from __future__ import annotations

import json
import os
import random

import pytest
import schedules

COLLECTIVES = 10_000
SIZES = (1, 2, 3, 4)
SCHEDULES = 4  # of each size, each with process sets, names and a cache of its own


@pytest.mark.parametrize("size", SIZES)
def test_every_result_of_random_schedules_agrees_with_numpy(size):
    calls = COLLECTIVES // len(SIZES) // SCHEDULES + 1
    seed = int(os.environ.get("HORORING_TEST_SEED", random.randrange(2**31)))
    given = [f"--ranks={size}", f"--seed={seed}", f"--calls={calls}", f"--schedules={SCHEDULES}"]
    job = schedules.run(schedules.parse(given))
    assert job.returncode == 0, job.report()
    assert json.loads(job.outputs[0].splitlines()[-1])["collectives"] >= COLLECTIVES // len(SIZES)
