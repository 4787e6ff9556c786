"""Installs what `make demo` needs into this environment, and says what that fetched and took.

    python tools/demo.py [INDEX]

INDEX is where pip finds builds of torch for CPUs only; without a GPU they are looked for first.
Files that pip has in its cache, or takes from a folder, count as fetched.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable

TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
UNITS = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
FETCHED = re.compile(r" *(?:Downloading|Using cached) \S+ \(([\d.]+) (\w+)\)|Processing (\S+\.whl)")


def fetched(lines: Iterable[str]) -> float:
    """Return the bytes of the files in pip's output."""
    total = 0.0
    for found in filter(None, map(FETCHED.match, lines)):
        number, unit, path = found.groups()
        total += os.path.getsize(path) if path else float(number) * UNITS[unit]
    return total


def pip(*words: str, may_fail: bool = False) -> float | None:
    """Install, show pip's lines, and return the bytes; None: it has failed."""
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", *words]
    lines = []
    errors = subprocess.DEVNULL if may_fail else None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return fetched(lines) if process.returncode == 0 else None


def main(index: str | None) -> int:
    """Return the exit code."""
    began, of_torch = time.monotonic(), None
    if not os.path.exists("/dev/nvidiactl"):
        print("no GPU: looking for the CPU build of torch, 0.2 GB")
        words = ["--extra-index-url", index] if index else []
        of_torch = pip(*words, f"{TORCH}+cpu", may_fail=True)
    if of_torch is None:
        print(
            "fetching torch with CUDA's libraries, 3 GB "
            f"(without a GPU, 0.2 GB are enough: make demo TORCH_INDEX={CPU_INDEX})"
        )
        of_torch = pip(TORCH)
    rest = None if of_torch is None else pip("--editable", ".[torch,examples]")
    if of_torch is None or rest is None:
        return 1
    seconds = time.monotonic() - began
    print(f"installed in {seconds:.0f} s: {(of_torch + rest) / 1e9:.2f} GB were fetched")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
