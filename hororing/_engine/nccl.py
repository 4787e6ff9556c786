"""Finds NCCL in the packages on which frameworks depend, or in the system.

Nothing is imported or loaded here. The core prefers a library that the process has already loaded,
and otherwise opens the first that it can.
"""

from __future__ import annotations

import os
import sys
from typing import Final

_SYSTEM: Final = "libnccl.so.2"
# The place in the packages nvidia-nccl-cu*. importlib.metadata would find them by name, but takes
# longer than the rest of init().
_IN_PACKAGE: Final = os.path.join("nvidia", "nccl", "lib", _SYSTEM)


def libraries(chosen: str | None = None) -> str:
    """Return paths to try, joined by colons: `chosen` alone if there is one."""
    if chosen:
        return chosen
    candidates = [os.path.join(folder, _IN_PACKAGE) for folder in sys.path]
    # The bare name also finds a library that is already loaded.
    return ":".join([*filter(os.path.exists, candidates), _SYSTEM])
