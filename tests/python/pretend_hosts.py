"""Ranks of one machine that believe they are on several hosts: see tests/pretend_hosts.cc.

It needs no rights, only a compiler. hosts.sh pretends more: addresses, wires and their rates, and
that /dev/shm is not shared.
"""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "pretend_hosts.cc"


@functools.cache
def why_not() -> str:
    """Why this machine cannot; "": it can."""
    if sys.platform != "linux":
        return "libraries are preloaded on Linux"
    return "" if _compiler() else "there is no C++ compiler"


def variables(names: str) -> list[str]:
    """NAME=VALUE of ranks that are on hosts of these names, in order of their ranks.

    For the ranks alone: mpirun itself must know where it is.
    """
    preloaded = [str(_library()), *os.environ.get("LD_PRELOAD", "").split()]
    return [f"LD_PRELOAD={':'.join(preloaded)}", f"PRETEND_HOSTS={names}"]


def _compiler() -> list[str]:
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    return shlex.split(found or "")


@functools.cache
def _library() -> Path:
    """Built once per process, and gone with it."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = Path(folder, "pretend_hosts.so")
    command = [*_compiler(), "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)
    return library
