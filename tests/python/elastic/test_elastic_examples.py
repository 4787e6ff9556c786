"""Elastic scripts under hororun; a rank is killed. Full tier, 20 s each."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import tiers
from hororun_jobs import ROOT, start
from live_job import PATIENCE_S, poll

pytestmark = [tiers.full, pytest.mark.timeout(300)]

TORCH = [str(ROOT / "examples/elastic_torch.py"), "--epochs", "60"]
JAX = [str(ROOT / "examples/jax_elastic.py"), "--epochs", "200"]
KERAS = [str(ROOT / "examples/elastic_keras.py"), "--epochs", "60"]
SCRIPT = str(ROOT / "tests/python/horovod/horovod_scripts/elastic_loop.py")
HOROVODS = ["-m", "hororing.as_horovod", SCRIPT]


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (TORCH, r"test accuracy 0.9\d+ after 60 epochs on \d ranks"),
        (KERAS, r"test accuracy 0.9\d+ after 60 epochs on \d ranks"),
        (JAX, r"test accuracy 0.9\d+ after 200 epochs on \d ranks"),
        (HOROVODS, r"done after 40 epochs on \d ranks"),
    ],
    ids=["torch", "keras", "jax", "horovod"],
)
def test_it_trains_to_the_end_without_a_rank(words: list[str], last: str, tmp_path: Path):
    pytest.importorskip("keras" if words is KERAS else "optax" if words is JAX else "torch")
    out = tmp_path / "out"

    def worlds() -> list[dict[str, Any]]:
        file = out / "membership.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def printed() -> str:
        return "".join(path.read_text() for path in sorted(out.glob("process.*/stdout")))

    job = start("-np", "3", "--min-np", "2", "--output", str(out), "python", *words)
    try:
        poll(lambda: "3 ranks from epoch 0 on" in printed() or job.poll() is not None)
        assert job.poll() is None, job.communicate()
        killed = int(worlds()[0]["members"][0]["pid"])
        os.kill(killed, signal.SIGKILL)
        said = job.communicate(timeout=PATIENCE_S)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, said
    assert len(re.findall(last, printed())) == 1, printed()
    first, second = worlds()[:2]
    assert [len(first["members"]), len(second["members"])] == [3, 2]
    assert killed not in [int(each["pid"]) for each in second["members"]]
