"""Helpers for tests of hororun: start it, talk to its ranks, see which processes are alive."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HORORUN = [sys.executable, "-m", "hororing.hororun"]
ROOT = Path(__file__).parents[3]
DEADLINE_S = 30.0
# A minimal rank.
SH = "/bin/sh"


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HORORUN, *words],
        env=environment(**more),
        capture_output=True,
        text=True,
        errors="surrogateescape",
        stdin=subprocess.DEVNULL,
        timeout=DEADLINE_S,
        check=False,
    )


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*HORORUN, *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        # Shells make background processes ignore SIGINT, and hororun would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def replace(file: Path, text: str) -> None:
    """Write a file that another process reads, which sees the old text or the new one."""
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(file)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def numbers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"pid=(\d+)", text)]


def sh(script: str) -> list[str]:
    return [SH, "-c", script]
