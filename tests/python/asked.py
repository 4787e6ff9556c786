"""A rank that is asked what it is doing, while it does it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from hororing import recorder


def asked_during(work: Callable[[], object], frame: str) -> recorder.Recording:
    """Repeat `work` on the main thread until a stack that was asked for shows `frame`; the answer.

    A stack may be of the moments before and between two rounds of `work`, so one is not enough.
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
