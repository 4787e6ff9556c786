"""A group's entries in torch's store: ranks at a barrier, and pending messages.

A message is a broadcast in a set of two ranks, so a receiver from any source must first find the
sender. It posts a request in the store; a rank with a pending message checks the store, and
announces its number. Messages that are received within milliseconds do not use the store, and
without receivers from any source nothing is left in it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any, Final

from hororing._job import threads
from hororing._requests import control

# Time between two polls of the store; the announcer's grows while nothing new is sent.
POLL_S: Final = 0.002
_SLOW_POLL_S: Final = 0.05
# The maximum wait for rank 0's result after the timeout of a monitored barrier.
_VERDICT_S: Final = 10.0


class Board:
    """The keys of a group in torch's store.

    Parameters
    ----------
    prefix : callable
        Returns the prefix of the keys, which no other group has used. May block.
    place : Place
        Of this rank in the group.
    """

    def __init__(self, store: Any, prefix: Callable[[], str], place: int) -> None:
        self._store, self._prefix, self._place = store, prefix, place
        self._barriers = itertools.count(1)
        self._lock = threading.RLock()
        self._receivers = 0
        self._read = 0
        self._announced: list[tuple[int, int, int]] = []

    # -- messages from any source

    def add_receivers(self, change: int) -> None:
        """Count receivers from any source on this rank: one more (1) or less (-1)."""
        with self._lock:
            before, self._receivers = self._receivers, self._receivers + change
            if not before or not self._receivers:
                self._store.set(
                    f"{self._prefix()}wants{self._place}", "yes" if self._receivers else ""
                )

    def has_receivers(self, target: int) -> bool:
        """Whether a rank of the group receives from any source."""
        key = f"{self._prefix()}wants{target}"
        return bool(self._store.check([key])) and bool(self._store.get(key))

    def announce(self, target: int, tag: int, number: int) -> None:
        """Announce to `target` that this rank's message with that tag and number is pending."""
        to = f"{self._prefix()}to{target}."
        place = self._store.add(to, 1)
        self._store.set(f"{to}{place}", f"{self._place} {tag} {number}")

    def take(self, tag: int, take: Callable[[int, int], bool]) -> int | None:
        """Return a rank that sends to this one, and for which `take(rank, number)` was true."""
        control.check_engine()
        with self._lock:
            to = f"{self._prefix()}to{self._place}."
            while self._store.check([key := f"{to}{self._read + 1}"]):
                source, its_tag, number = map(int, self._store.get(key).split())
                self._announced.append((source, its_tag, number))
                self._store.delete_key(key)
                self._read += 1
            for each in [each for each in self._announced if each[1] == tag]:
                self._announced.remove(each)
                if take(each[0], each[2]):
                    return each[0]
        return None

    # -- barrier

    def missing(self, size: int, timeout_s: float) -> list[int] | None:
        """Wait for the other ranks; return those that are late. None: rank 0 did not answer.

        All ranks that call it get the same answer, even late ones.
        """
        number = next(self._barriers)
        key = f"{self._prefix()}barrier{number}."
        self._store.set(f"{key}{self._place}", "")
        end = monotonic() + timeout_s
        if self._place == 0:
            missing = list(range(1, size))
            while missing := [rank for rank in missing if not self._store.check([f"{key}{rank}"])]:
                control.check_engine()
                if monotonic() >= end:
                    break
                sleep(POLL_S)
            self._store.set(f"{key}verdict", " ".join(map(str, missing)))
            # The store, or the job, may end with this rank.
            readers = [f"{key}read{rank}" for rank in range(1, size) if rank not in missing]
            end = monotonic() + _VERDICT_S
            while readers and not self._store.check(readers) and monotonic() < end:
                sleep(POLL_S)
            if not missing:  # then no rank reads the previous barrier's keys any more
                last = f"{self._prefix()}barrier{number - 1}."
                for rank in range(size):
                    self._store.delete_key(f"{last}{rank}")
                    self._store.delete_key(f"{last}read{rank}")
                self._store.delete_key(f"{last}verdict")
            return missing
        while not self._store.check([f"{key}verdict"]):
            try:
                control.check_engine()
            except Exception:  # a rank that has read the verdict may have ended since
                if not self._store.check([f"{key}verdict"]):
                    raise
            if monotonic() >= end + _VERDICT_S:
                return None
            sleep(POLL_S)
        missing = list(map(int, self._store.get(f"{key}verdict").split()))
        if self._place not in missing:
            self._store.set(f"{key}read{self._place}", "")
        return missing


class _Announcer:
    """A thread that checks whether receivers want to know about waiting messages."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Any, tuple[Board, int, int, int]] = {}
        self._has_new = False
        self._sleeps = False
        self._started = False
        self._ends = False

    def watch(self, message: Any, board: Board, target: int, tag: int, number: int) -> None:
        """Announce `message`, which is not complete, as soon as `target` asks."""
        self._waiting[message] = board, target, tag, number
        self._has_new = True
        if self._sleeps or not self._started:
            with self._changed:
                if not self._started:
                    threads.start_in_library(self._run, "hororing-torch-any-source", self._stop)
                self._started, self._sleeps = True, False
                self._changed.notify()

    def forget(self, message: Any) -> None:
        """The message is complete, or given up."""
        self._waiting.pop(message, None)

    def _stop(self) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify()

    def _run(self) -> None:
        period_s = POLL_S
        while not self._ends:
            with self._changed:
                self._sleeps = True  # before the check: `watch` does both in the other order
                self._changed.wait_for(lambda: self._ends or self._waiting or not self._sleeps)
                self._sleeps = False
            period_s = POLL_S if self._has_new else min(1.2 * period_s, _SLOW_POLL_S)
            self._has_new = False
            sleep(period_s)
            waiting = list(self._waiting.items())
            wanted: dict[tuple[Board, int], bool] = {}
            for message, (board, target, tag, number) in waiting:
                try:
                    done = message.complete()
                    if not done and (board, target) not in wanted:
                        wanted[board, target] = board.has_receivers(target)
                    if not done and wanted[board, target]:
                        board.announce(target, tag, number)
                        done = True
                except Exception:  # the engine or store has ended: the waiting caller gets it
                    done = True
                if done:
                    self.forget(message)


announcer = _Announcer()
