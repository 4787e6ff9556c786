"""Makes ranks of one machine see different host names: see tests/pretend_hosts.cc.

It needs no privileges, only a compiler. hosts.sh emulates more: addresses, links and their rates,
and a separate /dev/shm.
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

SOURCE = Path(__file__).parents[2] / "pretend_hosts.cc"


@functools.cache
def why_not() -> str:
    """Return why this machine cannot do it, or "" if it can."""
    if sys.platform != "linux":
        return "libraries are preloaded on Linux"
    return "" if _compiler() else "there is no C++ compiler"


def variables(names: str) -> list[str]:
    """Return NAME=VALUE for ranks that see these host names, in the order of ranks.

    Only for ranks: mpirun itself must see the real name.
    """
    preloaded = [str(_library()), *os.environ.get("LD_PRELOAD", "").split()]
    return [f"LD_PRELOAD={':'.join(preloaded)}", f"PRETEND_HOSTS={names}"]


def _compiler() -> list[str]:
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    return shlex.split(found or "")


@functools.cache
def _library() -> Path:
    """Build the library, once per process; it is removed at exit."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = Path(folder, "pretend_hosts.so")
    command = [*_compiler(), "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)
    return library
