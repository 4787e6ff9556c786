"""What a rank does in a search: it carries out trials, and the orders of the hub on rank 0.

Three threads share the work. The caller's thread trains. A reader receives messages, and interrupts
the trial if the hub gives it up. A third thread creates and removes process sets and copies states,
in the order of the messages, which is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import hororing
import hororing.numpy as hvd
from hororing.extension import ProcessSet, obtain
from hororing.toolkit.search.trial import Trial
from hororing.toolkit.tracking.sweep import StopEarly

# Its default action is to ignore it: one that comes too late does no harm.
_SIGNAL = signal.SIGURG

_PACKAGE = os.path.join(os.path.dirname(hororing.__file__), "")

# How long removing the process sets may take where a rank hangs.
_LAST_S = 10.0

# Connections that tell other processes when this one has ended.
_kept: list[Connection] = []

Message = dict[str, Any]


class _GivenUp(BaseException):
    """Raised inside a trial that another rank has failed, or that is silent for too long."""


class _Paused(StopEarly):
    """Raised by `report`: another process goes on from this state."""


class _Diverged(StopEarly):
    """Raised by `report` for a value that is not finite."""


class Worker:
    """The part of this rank in a search.

    Parameters
    ----------
    connection : Connection
        To the hub.
    sets : list
        The process sets of the trials, registered on all ranks.
    train : callable
        The user's function.
    silence_s : float
        How long the hub may be silent, in seconds.
    """

    def __init__(
        self,
        connection: Connection,
        sets: list[ProcessSet],
        train: Callable[[Trial], Any],
        silence_s: float,
    ) -> None:
        self._connection, self._sets, self._train = connection, sets, train
        self._mine = next(i for i, each in enumerate(sets) if each.included())
        self._silence_s = silence_s
        self._heard = time.monotonic()
        self._trials: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: int | None = None  # number of the trial in `train`
        self._given_up: set[int] = set()  # numbers
        self._states: dict[tuple[int, int], Any] = {}  # by member and generation
        self._key: tuple[int, int] | None = None  # of the trial that runs
        self._order_thread = threading.Thread(target=self._carry_out, daemon=True)

    def run(self) -> Message:
        """Carry out trials until the hub ends the search; return its last message."""
        in_main = threading.current_thread() is threading.main_thread()
        self._thread = threading.get_ident() if in_main else None
        before = signal.signal(_SIGNAL, self._interrupt) if in_main else None
        threading.Thread(target=self._read, daemon=True).start()
        self._order_thread.start()
        try:
            while (message := self._next())["kind"] != "end":
                done = self._carry_out_trial(message)
                with contextlib.suppress(OSError):  # the search has ended without this rank
                    self._connection.send(done)
        except BaseException:  # Ctrl-C: others must not wait
            with contextlib.suppress(OSError):
                self._connection.send({"kind": "left"})
            self._order_thread.join(_LAST_S)
            raise
        finally:
            if in_main:
                signal.signal(_SIGNAL, before)
        # Process sets are removed by all ranks together, and one that hangs may not take part.
        in_doubt = message["lost"] or "error" in message
        self._order_thread.join(_LAST_S if in_doubt else None)
        return message

    # The caller's thread

    def _next(self) -> Message:
        while True:
            try:
                found = self._trials.get(timeout=1.0)
            except queue.Empty:
                if time.monotonic() - self._heard > self._silence_s:
                    why = f"rank 0, which hands out the trials, was silent for {self._silence_s} s"
                    raise RuntimeError(f"search: {why}") from None
                continue
            if isinstance(found, BaseException):
                raise found
            return found  # type: ignore[no-any-return]

    def _carry_out_trial(self, message: Message) -> Message:
        number = message["number"]
        trial = Trial(
            number, message["params"], message["seed"], self._sets[self._mine], self._ask,
            self._states.get(message["state"]), message["first_step"],
        )  # fmt: skip
        self._key = message["key"]
        if self._key is not None:  # two generations may be needed: this one, and the one before
            old = [key for key in self._states if key[1] < self._key[1] - 1]
            for key in old:
                del self._states[key]
        status, value, why = "failed", None, ""
        begin = time.monotonic()
        try:
            with self._lock:
                if number in self._given_up:
                    raise _GivenUp
                self._running = number
            result = self._train(trial)
            self._running = None
            value, why = self._checked(result)
            status = "failed" if why else "completed"
        except _GivenUp as error:
            self._running = None
            status, why = "given up", _where(error)
        except _Paused:
            self._running = None
            status = "paused"
        except _Diverged as error:
            self._running = None
            why = str(error)
        except StopEarly:
            self._running = None
            status = "pruned"
        except Exception as error:  # the trial has failed; its ranks go on
            self._running = None
            status, why = "given up", _where(error)
            if number not in self._given_up:  # else what was in flight has failed
                status, why = "failed", f"{type(error).__name__}: {error} ({why})"
        except BaseException:
            self._running = None
            raise
        times = {"begin": begin, "end": time.monotonic()}
        return {"kind": "done", "number": number, "status": status, "value": value, "why": why,
                **times}  # fmt: skip

    def _checked(self, result: Any) -> tuple[float | None, str]:
        if result is None or hvd.rank() != self._sets[self._mine].ranks[0]:
            return None, ""  # the latest report counts
        try:
            value = float(result)
        except (TypeError, ValueError):
            return None, f"train returned {result!r:.80}, which is no number"
        return value, "" if math.isfinite(value) else f"train returned {value}"

    def _ask(self, trial: Trial, step: int, value: float, state: Any) -> None:
        if self._key is not None and state is None:
            raise ValueError(f'report(step={step}): scheduler="pbt" needs state=')
        number = trial.number
        self._connection.send({"kind": "report", "number": number, "step": step, "value": value})
        answer = self._answers.get()
        while answer["number"] != number:  # for a trial that was given up
            answer = self._answers.get()
        decision = answer["decision"]
        if decision == "pause":
            assert self._key is not None
            self._states[self._key] = copy.deepcopy(state)
            raise _Paused
        if decision == "diverged":
            raise _Diverged(f"diverged: {answer['value']} in step {step}")
        if decision == "stop":
            raise StopEarly

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        if self._running is not None and self._running in self._given_up:
            self._running = None  # once
            raise _GivenUp

    # The reader

    def _read(self) -> None:
        try:
            while True:
                message = self._connection.recv()
                self._heard = time.monotonic()
                kind = message["kind"]
                if kind == "answer":
                    self._answers.put(message)
                elif kind == "give up":
                    self._give_up(message["number"])
                elif kind == "end":
                    self._orders.put(message)
                    self._trials.put(message)
                    if message["lost"]:
                        self._end_with_others()
                    return
                elif kind == "trial" and not message["ordered"]:
                    self._trials.put(message)
                elif kind != "ping":
                    self._orders.put(message)
        except (EOFError, OSError):
            self._trials.put(RuntimeError("search: rank 0, which hands out the trials, has left"))

    def _end_with_others(self) -> None:
        """End this process if it hangs still when the others have ended: the launcher waits."""
        _kept.append(self._connection)  # it closes with this process
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._connection.recv()
        if self._running is not None:
            why = (
                f"trial {self._running} hangs on rank {hvd.rank()}, and the other ranks have ended"
            )
            print(f"search: {why}; so does this one", file=sys.stderr, flush=True)
            os._exit(1)

    def _give_up(self, number: int) -> None:
        with self._lock:
            self._given_up.add(number)
            if self._running == number and self._thread is not None:
                signal.pthread_kill(self._thread, _SIGNAL)

    # The thread of orders

    def _carry_out(self) -> None:
        try:
            while (order := self._orders.get())["kind"] != "end":
                if order["kind"] == "replace":
                    ranks = self._sets[order["set"]].ranks
                    hvd.remove_process_set(self._sets[order["set"]])
                    self._sets[order["set"]] = hvd.add_process_set(ranks)
                elif order["kind"] == "copy":
                    self._copy(order)
                else:
                    self._trials.put(order)
            for each in self._sets:
                hvd.remove_process_set(each)  # False for the global one
        except Exception as error:  # a rank was lost, for example: `run` raises it
            self._trials.put(error)

    def _copy(self, order: Message) -> None:
        """Bring a state from one process set to another one."""
        source, target = (self._sets[order[end]].ranks for end in ("source", "target"))
        ranks = sorted({*source, *target})
        among = hvd.global_process_set if len(ranks) == hvd.size() else obtain(ranks)
        if among.included():
            mine = self._states.get(order["key"]) if hvd.rank() == source[0] else None
            state = hvd.broadcast_object(mine, source[0], "search.state", among)
            if hvd.rank() in target:
                self._states[order["key"]] = state


def _where(error: BaseException) -> str:
    """The innermost line outside of this package, and whether a call of hororing waits there."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.name != "_interrupt"]
    inner = [each for each in frames if not each.filename.startswith(_PACKAGE)]
    if not inner:
        return "before it began"
    what = "in" if inner[-1] is frames[-1] else "waiting for other ranks in"
    return f"{what} {inner[-1].filename}:{inner[-1].lineno}, {inner[-1].name}"
