"""Threads that call into another library, and the end of the process.

When the interpreter ends, Python ends each thread that returns to it. If the thread is in C++ that
may not be unwound, the process aborts (SIGABRT), with a wrong exit code. So these threads are asked
to end first. If one is still in the library then, the process ends without it: nothing of Python
runs after that.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Final

from hororing.process_end import exit_code, leave_at_once, note_exit_codes

_PATIENCE_S: Final = 5.0  # for a callback of the script's

_threads: dict[threading.Thread, Callable[[], None] | None] = {}


def start(body: Callable[[], None], name: str, stop: Callable[[], None] | None) -> None:
    """Run `body` in a daemon thread.

    `stop` is called when the process ends, and makes `body` return soon. None: nothing does, and
    nobody waits for it.
    """
    note_exit_codes()
    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    for each in [each for each in _threads if not each.is_alive()]:
        del _threads[each]
    _threads[thread] = stop


def _end() -> None:
    stops = [stop for thread, stop in _threads.items() if thread.is_alive() and stop is not None]
    for ask in dict.fromkeys(stops):
        ask()
    deadline = time.monotonic() + _PATIENCE_S
    for thread, stop in _threads.items():
        if stop is not None:
            thread.join(max(deadline - time.monotonic(), 0.0))
    if any(thread.is_alive() for thread in _threads):
        leave_at_once(exit_code())


# Before `init` registers its hook: the last registered is called first.
atexit.register(_end)
