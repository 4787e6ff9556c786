"""Messages between two ranks of a group: a broadcast in a process set of the two.

The pair requests its set with its first message, in either direction. Neither rank can wait for the
other there, because each may first exchange messages with other ranks. A message is therefore
submitted as soon as the set exists, by a caller that waits for it or polls it, or by the thread of
the futures. A message from any source is submitted as soon as its source is known.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch

from hororing._requests import handles
from hororing._requests.process_sets import ProcessSet, SetOfMembers
from hororing.torch.distributed.board import POLL_S, announcer
from hororing.torch.distributed.work import Work, completions


class Route(NamedTuple):
    """The set of both ranks, the sender's rank in the group, and the number of the message."""

    pair: SetOfMembers
    source: int
    number: int
    name: str


class Message(Work):
    """A tensor that is sent or received.

    Parameters
    ----------
    verb : str
        For errors.
    find : callable
        Returns its route, or None while it is unknown. Does not block.
    start : callable
        Submits the request under the route's name in its set, and returns the handle.
    found : callable, optional
        Called once, when `find` is no longer called.
    """

    def __init__(
        self,
        verb: str,
        tensor: torch.Tensor,
        timeout_s: float,
        find: Callable[[], Route | None],
        start: Callable[[ProcessSet, Route], int],
        finish: Callable[[Any], None] | None,
        found: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(verb, 0, [tensor], timeout_s, finish)
        self._done = False
        self._find: Callable[[], Route | None] | None = find
        self._found = found
        self._route: Route | None = None
        self._start: Callable[[ProcessSet, Route], int] | None = start
        self._deadline = monotonic() + timeout_s
        if self._is_ready():
            self._submit()
        else:
            completions.watch(self)

    def source_rank(self) -> int:
        """Return which rank of the group sent it. ValueError: not known yet."""
        if self._route is None:
            raise ValueError(f"{self._title}: the source is not known yet; call wait() first")
        return self._route.source

    _source_rank = source_rank

    def _is_ready(self) -> bool:
        """Whether `_submit` can submit it, or it has an error."""
        with self._lock:
            if self._find is not None:
                try:
                    self._route = self._find()
                except Exception as error:  # the engine has ended, or there is no store
                    self._fail(error)
                if self._route is None:
                    return self._done
                self._title = f"{self._title} '{self._route.name}'"
                self._stop_looking()
        return self._done or self._route is None or self._route.pair.ready()

    def _stop_looking(self) -> None:
        if self._find is not None:
            self._find = None
            with suppress(Exception):  # the store has ended
                self._found()

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._end()

    def _submit(self) -> None:
        """Submit the request to the engine, once; the set exists, or never will."""
        with self._lock:
            start, self._start = self._start, None
            if start is None or self._done or self._route is None:
                return
            try:
                pair = self._route.pair.get(0.0)
                assert pair is not None
                self._handle = start(pair, self._route)
            except Exception as error:  # the engine has ended
                self._fail(error)
        if self._done:
            self._notify()

    def _wait(self, timeout_s: float) -> None:
        end = monotonic() + timeout_s
        while not self._is_ready() and self._route is None:
            if monotonic() >= end:
                return self.expire(timeout_s)
            sleep(POLL_S)
        if self._start is not None and self._route is not None:
            with suppress(Exception):  # `_submit` gets it, too
                if self._route.pair.get(max(end - monotonic(), 0.0)) is None:
                    return self.expire(timeout_s)
            self._submit()
        if self._done:
            return
        if handles.wait_at_most(self._handle, max(end - monotonic(), 0.0)):
            self.settle()
        else:
            self.expire(timeout_s)

    def complete(self) -> bool:
        """Whether `settle` would return at once."""
        if self._start is not None and not self._done:
            if not self._is_ready():
                return False
            self._submit()
        return super().complete()

    def _abandon(self) -> None:
        self._start = None
        self._stop_looking()
        if self._handle:
            super()._abandon()

    def _end(self) -> None:
        self._stop_looking()
        announcer.forget(self)
        super()._end()

    @property
    def blocks(self) -> bool:  # type: ignore[override]
        """False before it is submitted: it is unknown whether another rank waits for it."""
        return self._start is None

    def look(self, now: float) -> bool:
        """Whether it is complete or too late, or submitted if no future needs more."""
        complete = super().look(now)
        return complete or (self._start is None and self._promise is None)

    def close(self) -> None:
        """Settle it after `look`, unless it was only submitted."""
        if self.complete() or monotonic() >= self._deadline:
            super().close()
