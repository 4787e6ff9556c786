"""Where NCCL may be: in the packages that bring it for a framework, or in the system.

Nothing is imported or loaded here; the core opens the first that can be opened, and before all
others one that the process has loaded already.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Final

_SYSTEM: Final = "libnccl.so.2"
# What torch and TensorFlow of a CUDA release depend on; newest first.
_PACKAGES: Final = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_IN_PACKAGE: Final = "nvidia/nccl/lib/libnccl.so.2"


def libraries(chosen: str | None = None) -> str:
    """Return paths to try, joined by colons: `chosen` alone if there is one."""
    if chosen:
        return chosen
    # The bare name also finds one that is loaded already, wherever it came from.
    return ":".join([*_installed(), _SYSTEM])


def _installed() -> list[str]:
    found = []
    for package in _PACKAGES:
        try:
            path = Path(str(metadata.distribution(package).locate_file(_IN_PACKAGE)))
        except metadata.PackageNotFoundError:
            continue
        if path.exists():
            found.append(str(path))
    return found
