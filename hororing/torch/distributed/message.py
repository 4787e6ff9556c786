"""Messages between two ranks of a group: a broadcast in a process set of the two.

The pair asks for its set with its first message, in either direction. Neither rank can wait for the
other there, since each may first have messages with other ranks: such a message is submitted as
soon as the set is there, by whoever waits for it or polls it, or by the thread of the futures.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

import torch

from hororing import collectives
from hororing.process_sets import ProcessSet, SetOfMembers
from hororing.torch.distributed.work import Work, completions


class Message(Work):
    """A tensor that is sent or received.

    Parameters
    ----------
    pair : the set of both ranks.
    start : submits the request in that set and returns its handle.
    source : which rank of the group sends.
    """

    def __init__(
        self,
        title: str,
        tensor: torch.Tensor,
        timeout_s: float,
        pair: SetOfMembers,
        start: Callable[[ProcessSet], int],
        source: int,
        finish: Callable[[Any], None] | None,
    ) -> None:
        super().__init__(title, 0, [tensor], timeout_s, finish)
        self._done = False
        self._pair = pair
        self._start: Callable[[ProcessSet], int] | None = start
        self._source = source
        self._deadline = monotonic() + timeout_s
        if pair.ready():
            self._submit()
        else:
            completions.watch(self)

    def source_rank(self) -> int:
        """Return which rank of the group has sent it."""
        return self._source

    _source_rank = source_rank

    def _submit(self) -> None:
        """Hand the request to the engine, once; the set is there, or will never be."""
        with self._lock:
            start, self._start = self._start, None
            if start is None or self._done:
                return
            try:
                pair = self._pair.get(0.0)
                assert pair is not None
                self._handle = start(pair)
            except Exception as error:  # the engine has ended
                self._error = error
                self._end()
        self._tell()

    def _wait(self, timeout_s: float) -> None:
        end = monotonic() + timeout_s
        if self._start is not None:
            with suppress(Exception):  # which `_submit` gets, too
                if self._pair.get(timeout_s) is None:
                    return self.expire(timeout_s)
            self._submit()
        if self._done:
            return
        if collectives.wait_at_most(self._handle, max(end - monotonic(), 0.0)):
            self.settle()
        else:
            self.expire(timeout_s)

    def complete(self) -> bool:
        """Whether `settle` would return at once."""
        if self._start is not None and not self._done:
            if not self._pair.ready():
                return False
            self._submit()
        return super().complete()

    def _abandon(self) -> None:
        self._start = None
        if self._handle:
            super()._abandon()

    @property
    def blocks(self) -> bool:  # type: ignore[override]
        """Nobody is known to wait for it before it is submitted."""
        return self._start is None

    def look(self, now: float) -> bool:
        """Whether it is complete or too late, or submitted, if nobody wants more."""
        complete = super().look(now)
        return complete or (self._start is None and self._promise is None)

    def close(self) -> None:
        """Settle it after `look`, but for one that is only submitted."""
        if self.complete() or monotonic() >= self._deadline:
            super().close()
