"""Stragglers, hangs and slow links at seeded places are named rightly (docs/watching.md).

100 cases. Full tier, 10 min, or 7 with `-n 2`. TEST_SEED repeats a series.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hororun_jobs
import mpirun
import pytest
from test_watching import Told

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SIZE, CASES = 4, 75
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
        time.sleep(0.2)

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
            noise = quiet(told)  # on a busy machine
            kind = ("sleep", "compute", "hang")[number % 3]
            rank = draw.choice([each for each in range(SIZE) if each not in noise])
            delay_s = draw.uniform(0.06, 0.3)
            began = time.monotonic()
            (tmp_path / "new").write_text(f"{kind} {rank} {delay_s}")
            (tmp_path / "new").rename(disturbance)
            found = first(told, kind, noise)
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
    assert took[CASES // 2] < 2  # s; on an idle machine, the slowest, too


def quiet(told: Told) -> set[int]:
    """Wait until nobody is late or missing, for a second; return the ranks that still are."""
    calm, end = 0, time.monotonic() + 10
    while calm < 5 and time.monotonic() < end:
        calm = calm + 1 if not guilty(told) else 0
        time.sleep(0.2)
    return {rank for each in guilty(told) for rank in each.get("ranks", ())}


def guilty(told: Told) -> list[dict[str, Any]]:
    state = told.state()["state"]
    if not state or not state["step_s"] or len(state["ranks"]) < SIZE:
        return [{}]
    return [each for each in state["findings"] if each["kind"] in ("late", "waiting", "hang")]


def first(told: Told, kind: str, noise: set[int]) -> dict[str, Any]:
    """Wait for the first finding, of a straggler or of a hang, that is not noise."""
    end = time.monotonic() + 60
    kinds = ("waiting", "hang") if kind == "hang" else ("late",)
    while True:
        found = [e for e in guilty(told) if e.get("kind") in kinds and not noise & {*e["ranks"]}]
        if found:
            return found[0]
        assert time.monotonic() < end, kind
        time.sleep(0.05)


# ---------------------------------------------------------------------------------------------
# Slow links: in the network of the first of three hosts, as hosts.sh starts it.


LINK_CASES = 25
AGENT = "PRTE_MCA_plm_ssh_agent"  # of hosts.sh
LINK_RANK = """
import time
import numpy as np
import hororing.numpy as hvd
hvd.init()
while True:
    time.sleep(0.02)
    for handle in [hvd.allreduce_async(np.ones(200_000, np.float32), name=n) for n in "abcdefgh"]:
        hvd.synchronize(handle)
"""


def shape(host: int, rate: str) -> None:
    """What this host sends from now on has this rate."""
    how = f"tc qdisc change dev eth0 root tbf rate {rate} burst 128kb latency 30ms"
    subprocess.run([os.environ[AGENT], f"host{host}", how], check=True)


def watch_links(hostfile: str, seed: int, script: str) -> None:
    process = hororun_jobs.start(
        "--rsh-agent", os.environ[AGENT], "--page", "0", "--grace", "1",
        "-hostfile", hostfile, "-np", "3", sys.executable, script,
    )  # fmt: skip
    assert process.stderr is not None
    told = Told(process.stderr.readline().split()[1])
    draw = random.Random(seed)
    took, wrong = [], []
    try:
        wait_for_links(told, slow=False)
        for number in range(LINK_CASES):
            host = (number + seed) % 3
            shape(host, f"{draw.randrange(30, 90)}mbit")
            began = time.monotonic()
            found = wait_for_links(told, slow=True)
            took.append(time.monotonic() - began)
            if found[0]["ranks"][0] != host:
                wrong.append(f"host {host}: {found}")
            shape(host, "400mbit")
            wait_for_links(told, slow=False)
    finally:
        process.terminate()
        print(process.communicate(timeout=60)[1])
    took.sort()
    rightly = f"{LINK_CASES - len(wrong)} of {LINK_CASES} slow links named rightly"
    median = took[LINK_CASES // 2]
    print(f"seed {seed}: {rightly}; median {median:.1f} s, slowest {took[-1]:.1f} s", *wrong)
    assert not wrong
    assert median < 2


def wait_for_links(told: Told, slow: bool) -> list[dict[str, Any]]:
    """Wait for a finding about a link, or until there was none for three seconds."""
    end, calm_since = time.monotonic() + 60, time.monotonic()
    while time.monotonic() < end:
        state = told.state()["state"]
        found = [each for each in (state or {}).get("findings", ()) if each["kind"] == "link"]
        if found and slow:
            return found
        ready = state and state["step_s"] and len(state["ranks"]) == 3 and state["links"]
        if found or not ready:
            calm_since = time.monotonic()
        if not slow and time.monotonic() - calm_since > 3:
            return []
        time.sleep(0.1)
    raise AssertionError(f"slow={slow}: {told.state()}")


@pytest.mark.skipif(bool(mpirun.why_no_hosts()), reason=mpirun.why_no_hosts())
def test_seeded_slow_links_are_named_rightly(tmp_path: Path):
    (tmp_path / "rank.py").write_text(LINK_RANK)
    seed = mpirun.new_seed()
    watcher = tmp_path / "watcher"
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(mpirun.__file__).parent)])
    # hosts.sh starts it like mpirun: --hostfile FILE -np N.
    watcher.write_text(
        f"#!/bin/bash\nunset TEST_SEED\nexport PYTHONPATH={hororun_jobs.ROOT}:{paths}\n"
        f"exec {sys.executable} -c "
        f"'from test_watching_cases import *; watch_links(\"'$2'\", {seed}, "
        f'"{tmp_path}/rank.py")\'\n'
    )
    watcher.chmod(0o755)
    done = subprocess.run(
        [mpirun.HOSTS, "1,1,1", "-r", "400mbit", watcher],
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
