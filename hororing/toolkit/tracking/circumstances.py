"""The circumstances of a run: versions, hosts, the commit."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from typing import Any

import hororing
import hororing.numpy as hvd
from hororing import config
from hororing.extension import host_names

# Packages whose versions are recorded if the script has imported them.
_PACKAGES = ("numpy", "torch", "tensorflow", "keras", "jax", "mpi4py")
_GIT_S = 5.0


def circumstances() -> dict[str, Any]:
    """Return the circumstances of this process. Without `init` it is one rank."""
    started = hvd.is_initialized()
    return {
        "time": time.time(),
        "command": shlex.join(sys.orig_argv),
        "folder": os.getcwd(),
        "versions": _versions(),
        "git": git_state(os.getcwd()),
        "host": platform.node(),
        "hosts": host_names() if started else [platform.node()],
        "ranks": hvd.size() if started else 1,
        "cores": os.cpu_count(),
        "settings": config.load().changed(),
    }


def _versions() -> dict[str, str]:
    found = {"hororing": hororing.__version__, "python": platform.python_version()}
    distributions = metadata.packages_distributions()
    for name in _PACKAGES:
        if name in sys.modules and name in distributions:
            found[name] = metadata.version(distributions[name][0])
    return found


def git_state(folder: str) -> dict[str, Any] | None:
    """Commit, branch, and whether files differ from it; None outside of a repository."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=_GIT_S
        )
        if done.returncode != 0:
            raise OSError(done.stderr.strip())
        return done.stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "branch": git("rev-parse", "--abbrev-ref", "HEAD"),
            "changed": git("status", "--porcelain", "--untracked-files=no").splitlines(),
        }
    except (OSError, subprocess.SubprocessError):
        return None
