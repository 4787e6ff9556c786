"""A KeyboardInterrupt at a chosen line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def interrupted(call: Callable[[], object], at: int, *functions: Any) -> bool:
    """Call with a KeyboardInterrupt before the `at`-th line that `functions` execute.

    Returns whether they execute that many lines.
    """
    codes = {function.__code__ for function in functions}
    left = at

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left == 0:
            raise KeyboardInterrupt
        return line

    sys.settrace(lambda frame, _, __: line if frame.f_code in codes else None)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False
