"""Asks this rank for its stack while it works."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from hororing._engine import recorder


def asked_during(work: Callable[[], object], frame: str) -> recorder.Recording:
    """Repeat `work` on the main thread until a requested stack shows `frame`; return the answer.

    One stack is not enough, because it may come from between two rounds of `work`.
    """
    answers: list[recorder.Recording] = []
    path = recorder.find(os.getpid())
    assert path is not None

    def ask() -> None:
        latest = time.monotonic() + 60
        while not answers or (frame not in answers[-1].stack and time.monotonic() < latest):
            answers.append(recorder.ask_for_stack(os.getpid(), path, patience_s=60))

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():
        work()
    assert frame in answers[-1].stack, answers[-1].stack
    return answers[-1]
