"""Events of an elastic job's store, from its thread to the thread of the job."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import threading
from collections.abc import Iterator

from hororing._job.rendezvous.elastic_store import CONNECTION_ENDED, Event, Lost

# How long the store may wait for the end of a process that it has declared dead. It receives
# nothing meanwhile, so this is less than PEER_TIMEOUT_S.
_GONE_S = 0.4


class Events:
    """Events of the store, from its thread to the thread of the job."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._queue: queue.SimpleQueue[tuple[Event, threading.Event]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selector
        selector.register(self._wake, selectors.EVENT_READ, self._woken)

    def put(self, event: Event) -> None:
        """Called by the store; returns when a process that it has declared dead has ended.

        A process that was only stopped could otherwise write into memory that it shares with the
        others. This waits only for processes of this host: other hosts may be unreachable.
        """
        gone = threading.Event()
        self._queue.put((event, gone))
        os.eventfd_write(self._wake, 1)
        if isinstance(event, Lost) and not event.refused and event.why != CONNECTION_ENDED:
            gone.wait(_GONE_S)

    def take(self, wait_s: float = 0.0) -> Iterator[tuple[Event, threading.Event]]:
        """Yield the received events. If there are none, wait at most this long for the first."""
        with contextlib.suppress(queue.Empty):
            yield self._queue.get(block=wait_s > 0, timeout=wait_s or None)
            while True:
                yield self._queue.get_nowait()

    def close(self) -> None:
        """Close it. REQUIRES: no thread calls `put` any more."""
        self._selector.unregister(self._wake)
        os.close(self._wake)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
