"""Transports between processes conform: tests/cpp/mpi_transport_check.cc, under mpirun."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import mpirun
import pytest
import tiers

PROGRAM = Path(__file__).parents[3] / "build" / "editable" / "mpi_transport_check"


@pytest.mark.parametrize("size", tiers.choose([2, 3, 4], push=[3]))
def test_transports_between_processes_conform(size: int):
    if not PROGRAM.exists():
        pytest.skip("mpi_transport_check is not built: make test-cpp builds it")
    done = subprocess.run(
        [mpirun.launcher(), "-np", str(size), str(PROGRAM)],
        env={**os.environ, **mpirun.LAUNCH_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=110,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert output.count(" 0 failed") == size, output
