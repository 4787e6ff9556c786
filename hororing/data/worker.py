"""What runs in the processes of a `hororing.data.pipeline.Pipeline`: one stage each.

Started as a fresh interpreter, never forked, and without the main script: what it calls comes by
cloudpickle. Its standard input says what to do, and keeps it alive: when that ends (the pipeline is
closed, or its process is gone, however), so does this one, at once.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import cloudpickle

from hororing.data.ring import Consumer, Producer, RingEnded

# How this process ends when others have ended before it.
LEFT_ALONE = 3
# Waits are as long as that: nothing needs to be looked at meanwhile.
_LONG_S = 3600.0


@dataclass
class Setup:
    """What a worker is told first."""

    stage: bytes  # the function, by cloudpickle
    title: str
    slot_bytes: int
    input: int | None  # descriptor of the ring; None for the first stage
    input_pid: int
    output: int


@dataclass
class Failure:
    """An exception of a stage, on its way to the consumer."""

    title: str
    item: str  # what it was about
    trace: str
    error: bytes | None  # the exception, if it can be pickled


def main() -> None:
    """Work until the standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who has started us
    orders = os.fdopen(os.dup(0), "rb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    setup: Setup = pickle.load(orders)
    epochs: queue.Queue[tuple[int, list[Any]]] = queue.Queue()
    threading.Thread(target=_listen, args=(orders, epochs), daemon=True).start()
    output = Producer(setup.output, setup.slot_bytes)
    try:
        stage = _loaded(setup)
        if setup.input is None:
            _first(stage, setup, epochs, output)
        else:
            _later(stage, setup, Consumer(setup.input, setup.input_pid), output)
    except RingEnded:
        os._exit(LEFT_ALONE)


def _listen(orders: BinaryIO, epochs: queue.Queue[tuple[int, list[Any]]]) -> None:
    try:
        while True:
            epochs.put(pickle.load(orders))
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _loaded(setup: Setup) -> Callable[[Any], Any]:
    try:
        stage: Callable[[Any], Any] = cloudpickle.loads(setup.stage)
    except Exception as error:
        failure = _failure(setup, "its function", error)

        def stage(item: Any) -> Any:
            raise _Forwarded(failure)

    return stage


class _Forwarded(Exception):
    """A failure that was described before."""


def _first(
    stage: Callable[[Any], Any],
    setup: Setup,
    epochs: queue.Queue[tuple[int, list[Any]]],
    output: Producer,
) -> None:
    while True:
        epoch, items = epochs.get()
        for item in items:
            if not epochs.empty():
                break  # nobody wants the rest
            _work(stage, setup, epoch, item, output)


def _later(stage: Callable[[Any], Any], setup: Setup, input: Consumer, output: Producer) -> None:
    while True:
        for epoch, item in input.take(_LONG_S, copy=False):
            if isinstance(item, Failure):
                _put(output, (epoch, item))
            else:
                _work(stage, setup, epoch, item, output)
            del item  # it lies in the slot
            input.release()


def _work(
    stage: Callable[[Any], Any], setup: Setup, epoch: int, item: Any, output: Producer
) -> None:
    try:
        _put(output, (epoch, stage(item)))
    except RingEnded:
        raise
    except _Forwarded as forwarded:
        _put(output, (epoch, forwarded.args[0]))
    except Exception as error:  # whatever it is, the consumer raises it
        _put(output, (epoch, _failure(setup, _shown(item), error)))


def _put(output: Producer, message: tuple[int, Any]) -> None:
    while not output.put(message, _LONG_S):
        pass


def _failure(setup: Setup, item: str, error: Exception) -> Failure:
    try:
        pickled: bytes | None = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)
    except Exception:
        pickled = None
    return Failure(setup.title, item, traceback.format_exc(), pickled)


def _shown(item: Any) -> str:
    try:
        text = repr(item)
    except Exception:
        text = object.__repr__(item)
    return text if len(text) < 200 else f"{text[:200]}..."
