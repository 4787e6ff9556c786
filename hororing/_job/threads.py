"""The package's own threads: they take no signals of the process, and let it end.

When the interpreter ends, Python ends each thread that returns to it. If the thread is in another
library's C++ that may not be unwound, the process aborts (SIGABRT), with a wrong exit code. So such
threads are asked to end first. If one is still in the library then, the process ends without it:
nothing of Python runs after that.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Final

# Those that report a fault of the thread itself stay.
_OTHERS: Final = {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS,
    signal.SIGABRT,
}  # fmt: skip
_PATIENCE_S: Final = 5.0  # for a callback of the script's

_in_libraries: dict[threading.Thread, Callable[[], None] | None] = {}


class _Process:
    """What the end of the process does about threads, set by whoever knows its exit code."""

    prepare: Callable[[], None] = staticmethod(lambda: None)
    leave: Callable[[], None] = staticmethod(lambda: os._exit(1))


def start(thread: threading.Thread) -> threading.Thread:
    """Start a thread that blocks signals, so that `sigwait` in a thread of the script gets them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OTHERS)
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread


def start_in_library(body: Callable[[], None], name: str, stop: Callable[[], None] | None) -> None:
    """Run `body`, which calls into another library, in a daemon thread.

    `stop` is called when the process ends, and makes `body` return soon. None: nothing does, and
    nobody waits for it.
    """
    _Process.prepare()
    thread = start(threading.Thread(target=body, name=name, daemon=True))
    for each in [each for each in _in_libraries if not each.is_alive()]:
        del _in_libraries[each]
    _in_libraries[thread] = stop


def at_process_end(prepare: Callable[[], None], leave: Callable[[], None]) -> None:
    """Call `prepare` before such a thread starts, and `leave` if one has not ended in time.

    `leave` ends the process at once, with its exit code.
    """
    _Process.prepare, _Process.leave = staticmethod(prepare), staticmethod(leave)


def _end() -> None:
    threads = _in_libraries.items()
    stops = [stop for thread, stop in threads if thread.is_alive() and stop is not None]
    for ask in dict.fromkeys(stops):
        ask()
    deadline = time.monotonic() + _PATIENCE_S
    for thread, stop in threads:
        if stop is not None:
            thread.join(max(deadline - time.monotonic(), 0.0))
    if any(thread.is_alive() for thread in _in_libraries):
        _Process.leave()


# Before `init` registers its hook: the last registered is called first.
atexit.register(_end)
