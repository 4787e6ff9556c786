"""What the main thread of this process is doing, in a sentence and as a stack."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from hororing.testing.channel import Channel, Closed
from hororing.testing.messages import Doing

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = (
    _PACKAGE,
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    "<frozen",
)
_INSTALLED = tuple(f"{os.sep}{name}-packages{os.sep}" for name in ("site", "dist"))
_RUNNERS = ("_pytest.", "pluggy.", "hororing.testing.")
_COMMUNICATES = ("hororing._requests.", "hororing._api.init", "torch.distributed")
_MOST = 100  # characters of an expression
_MOST_CALLEES = 4  # frames in which the tensor may be an argument


def answer(channel: Channel, main: int) -> None:
    """Answer the questions of the process of the tests, until that has ended."""
    while True:
        try:
            since, _ = channel.receive()
            frame = sys._current_frames().get(main)
            channel.send(_nothing() if frame is None else describe(frame, since))
        except Closed:
            return


def _nothing() -> Doing:
    return Doing("has no main thread any more", "", 0, "")


def describe(frame: FrameType, since: float = 0.0) -> Doing:
    """Describe a thread by its innermost frame. `since`: requests are of later, in time.time()."""
    frames = _own(list(_outwards(frame))[::-1])
    users = [each for each in frames if not is_library(each.f_code.co_filename)]
    here = users[-1] if users else frames[-1]
    below = frames[frames.index(here) + 1 :]
    waits = any(str(each.f_globals.get("__name__")).startswith(_COMMUNICATES) for each in below)
    tensor = _tensor(below) if waits else ""
    what = f"{'waits in' if waits else 'is in'} {_expression(here)}{tensor}"
    pairs = ((each, each.f_lineno) for each in frames)
    stack = "".join(traceback.StackSummary.extract(pairs).format())
    file = here.f_code.co_filename
    return Doing(what, file, here.f_lineno, stack, _requests(since))


def is_library(file: str) -> bool:
    """Whether a file is not the user's. An environment may borrow the packages of another."""
    return file.startswith(_LIBRARIES) or any(each in file for each in _INSTALLED)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _own(frames: list[FrameType]) -> list[FrameType]:
    """Without the frames of pytest and of this package around a test; outermost first."""
    for at in range(len(frames) - 1, -1, -1):
        if str(frames[at].f_globals.get("__name__")).startswith(_RUNNERS):
            return frames[at + 1 :] or frames
    return frames


def _expression(frame: FrameType) -> str:
    """The text of the call that the frame is in, or its line."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    whole = linecache.getline(file, line, frame.f_globals).strip()
    if hasattr(frame.f_code, "co_positions") and frame.f_lasti >= 0:  # from Python 3.11
        begin, end, left, right = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        if begin and end and left is not None and right is not None:
            lines = [
                linecache.getline(file, number, frame.f_globals).encode()
                for number in range(begin, end + 1)
            ]
            lines[-1] = lines[-1][:right]
            lines[0] = lines[0][left:]
            whole = " ".join(each.decode("utf-8", "replace").strip() for each in lines) or whole
    whole = whole or frame.f_code.co_name
    return whole if len(whole) <= _MOST else f"{whole[:_MOST]}..."


def _tensor(frames: list[FrameType]) -> str:
    """The first tensor among the arguments of these calls, as "4 x float32"."""
    for frame in frames[:_MOST_CALLEES]:
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)
        for name in code.co_varnames[:count]:
            value = frame.f_locals.get(name)
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if text := _sizes(each):
                    return f": {text}"
    return ""


def _sizes(value: Any) -> str:
    try:
        shape, dtype = tuple(value.shape), value.dtype
        count = 1
        for size in shape:
            count *= int(size)
        return f"{count} x {getattr(dtype, 'name', None) or str(dtype).rpartition('.')[2]}"
    except Exception:  # it is no tensor, whatever it is
        return ""


def _requests(since: float) -> list[str]:
    recorder = sys.modules.get("hororing._engine.recorder")
    if recorder is None:
        return []
    try:
        path = recorder.find(os.getpid())
        waits = recorder.read(path).unfinished() if path else []
        return [each.request for each in waits if each.time >= since]
    except (OSError, ValueError):
        return []


def start_answering(channel: Channel) -> None:
    """Answer in a thread of its own, about this one."""
    main = threading.get_ident()
    # Imported late: ranks that only use gloo need nothing else of hororing.
    from hororing._job import threads

    thread = threading.Thread(target=answer, args=(channel, main), name="watch", daemon=True)
    threads.start(thread)
