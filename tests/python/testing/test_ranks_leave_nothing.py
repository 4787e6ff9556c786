"""However pytest ends, no process, socket or file in shared memory of its ranks is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import mpirun
import psutil
import pytest
from live_job import MARK, SHM, poll, processes_marked

TESTS = """
import os, subprocess, sys, time
import numpy as np, pytest
import hororing.numpy as hvd

@pytest.mark.ranks(2, limit_s=200)
def test_works_long_and_has_children():
    hvd.allreduce(np.ones(100000))
    child = subprocess.Popen(["sleep", "1000"], start_new_session=hvd.rank() == 1)
    open(f"{hvd.rank()}.pid", "w").write(str(os.getpid()))
    if os.environ.get("ENDS"):
        return
    while True:
        hvd.allreduce(np.ones(1000))

@pytest.mark.ranks(2)
def test_crashes():
    os.abort()
"""


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "how",
    ["Ctrl-C", "SIGKILL", pytest.param("SIGTERM", marks=FULL), pytest.param("a crash", marks=FULL)],
)
def test_nothing_is_left(how: str, tmp_path: Path):
    (tmp_path / "test_long.py").write_text(TESTS)
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, **({"ENDS": "1"} if how == "a crash" else {})}
    tests = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:hypothesispytest", "test_long.py"],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True,
        # Shells make background processes ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    files = [tmp_path / f"{rank}.pid" for rank in range(2)]
    assert poll(lambda: all(each.exists() and each.read_text() for each in files))
    pids = [int(each.read_text()) for each in files]
    if how != "a crash":
        assert psutil.pid_exists(pids[0])
        number = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}
        tests.send_signal(number[how])
    out, _ = tests.communicate(timeout=100)
    if how == "Ctrl-C":
        assert "KeyboardInterrupt" in out
    assert poll(lambda: not processes_marked(mark), 20), processes_marked(mark)
    names = tuple(f"hororing.{pid}." for pid in [tests.pid, *pids])
    assert not [each for each in os.listdir(SHM) if each.startswith(names)]


STARTS_A_JOB = """
import sys, mpirun
file, folder = sys.argv[1:]
mpirun.start(folder, 2, ["--script", file], {}).wait()
"""


def test_our_own_jobs_end_with_a_killed_process_of_tests(tmp_path: Path):
    (tmp_path / "sleep.py").write_text("import time; print('here', flush=True); time.sleep(1000)")
    mark = uuid.uuid4().hex
    arguments = [str(tmp_path / "sleep.py"), str(tmp_path)]
    environment = {**os.environ, MARK: mark, "PYTHONPATH": os.path.dirname(mpirun.__file__)}
    tests = subprocess.Popen([sys.executable, "-c", STARTS_A_JOB, *arguments], env=environment)
    printed = [tmp_path / f"{rank}.out" for rank in range(2)]
    assert poll(lambda: all(each.exists() and "here" in each.read_text() for each in printed))
    tests.kill()
    tests.wait()
    assert poll(lambda: not processes_marked(mark), 20), processes_marked(mark)
