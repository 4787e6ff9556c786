"""Where NCCL may be: in the packages that bring it for a framework, or in the system.

Nothing is imported or loaded here; the core opens the first that can be opened, and before all
others one that the process has loaded already.
"""

from __future__ import annotations

import os
import sys
from typing import Final

_SYSTEM: Final = "libnccl.so.2"
# Where the packages nvidia-nccl-cu* have it, on which frameworks depend. importlib.metadata would
# find them by name, but takes init() longer than all else.
_IN_PACKAGE: Final = os.path.join("nvidia", "nccl", "lib", _SYSTEM)


def libraries(chosen: str | None = None) -> str:
    """Return paths to try, joined by colons: `chosen` alone if there is one."""
    if chosen:
        return chosen
    candidates = [os.path.join(folder, _IN_PACKAGE) for folder in sys.path]
    # The bare name also finds one that is loaded already, wherever it came from.
    return ":".join([*filter(os.path.exists, candidates), _SYSTEM])
