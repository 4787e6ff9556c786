"""The result of a collective of torch.distributed: a `Work`, and its future.

The caller that waits for a work, or polls it, finishes it. Works whose future was requested (by
DDP, for example) are finished by threads, because C++ waits for futures without us. One thread
waits for the engine's next completion; another runs only while the first runs a future's callback.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as torch_distributed

from hororing._job import threads
from hororing._requests import handles
from hororing.errors import StalledError
from hororing.torch._tensor.uncompiled import uncompiled

# torch's stubs lack many names.
dist: Any = torch_distributed
_Work: Any = dist.Work

# Time between two checks for events that the engine does not report.
_POLL_S = 0.01


class Work(_Work):  # type: ignore[misc]
    """One request in flight.

    Parameters
    ----------
    title : str
        For errors, such as "allreduce 'group0.5'".
    handle : int
        Of `hororing._requests.handles`; 0: it is complete.
    result : list of torch.Tensor
        The list of tensors that `result()` and the future return.
    finish : callable, optional
        Called once with the result of `collectives.wait(handle)`, by any thread.
    timeout_s : float
        The maximum wait.
    on_future : callable, optional
        Called with the future, when it is first requested.
    """

    def __init__(
        self,
        title: str,
        handle: int,
        result: list[torch.Tensor],
        timeout_s: float,
        finish: Callable[[Any], None] | None = None,
        on_future: Callable[[Any], None] = lambda future: None,
    ) -> None:
        super().__init__()
        self._title = title
        self._handle = handle
        self._result = result
        self._timeout_s = timeout_s
        self._finish = finish
        self._on_future = on_future
        self._done = handle == 0
        self._error: Exception | None = None
        # Reentrant: a signal handler on the same thread may wait, too.
        self._lock = threading.RLock()
        self._promise: Any = None
        self._future: Any = None
        self._deadline = 0.0

    # At the end of the interpreter, names of modules are None, and the engine has ended.
    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not self._done and self._handle and not ending():
            handles.abandon(self._handle, self._result)

    @uncompiled
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is complete; return True, or raise its error.

        The GIL is released, and Ctrl-C works. StalledError after `timeout`, by default that of the
        call or its group. The request then stays in flight, and the other ranks can complete it.
        """
        if not self._done:
            seconds = timeout.total_seconds() if timeout else 0.0
            self._wait(seconds if seconds > 0 else self._timeout_s)
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, timeout_s: float) -> None:
        if handles.wait_at_most(self._handle, timeout_s):
            self.settle()
        else:
            self.expire(timeout_s)

    def synchronize(self) -> None:
        """Like `wait`."""
        self.wait()

    def complete(self) -> bool:
        """Whether `settle` would return at once."""
        if self._done:
            return True
        try:
            return handles.poll(self._handle)
        except ValueError:  # another thread has just finished it
            return True

    def settle(self) -> None:
        """Finish it; blocks until it is complete."""
        with self._lock:
            if not self._done:
                try:
                    value = handles.wait(self._handle)
                    if self._finish is not None:
                        self._finish(value)
                except Exception as error:  # `wait` raises it
                    self._error = error
                self._end()
        self._notify()

    def expire(self, timeout_s: float) -> None:
        """Abandon it. The engine keeps the memory that it may still write."""
        with self._lock:
            if self._done:
                return
            self._error = StalledError(
                f"{self._title} has waited for {timeout_s:g} s, the timeout of the call: every "
                "rank of the process group must make it; the log of rank 0 names those that have "
                "not, after HORORING_STALL_WARNING_S"
            )
            self._abandon()
            self._end()
        self._notify()

    def _abandon(self) -> None:
        handles.abandon(self._handle, self._result)

    def _end(self) -> None:
        self._done = True
        self._finish = None

    def _notify(self) -> None:
        with self._lock:
            promise, self._promise = self._promise, None
        if promise is not None:
            promise.set_result(None)

    @uncompiled
    def is_completed(self) -> bool:
        """Whether `wait` returns at once. Completes it if possible."""
        if not self._done and self.complete():
            self.settle()
        return self._done

    def is_success(self) -> bool:
        """Whether it is complete and has no error."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return its error, if it is complete and has one."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that it writes."""
        return self._result

    def source_rank(self) -> int:
        """Return the rank of the group that sent it. ValueError unless it was received."""
        raise ValueError(f"{self._title} has no source rank; irecv has")

    _source_rank = source_rank

    @uncompiled
    def get_future(self) -> Any:
        """Return a future of `result()`. Its callbacks run on a thread of hororing."""
        with self._lock:
            if self._future is None:
                promise: Any = torch.futures.Future()
                # C++ sees an error only if a callback raises it.
                self._future = promise.then(self._value)
                self._on_future(self._future)
                self._promise = promise
                self._deadline = monotonic() + self._timeout_s
        if self._done:
            self._notify()
        else:
            completions.watch(self)
        return self._future

    def _value(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    # For `_Completions`.

    blocks = True  # a waiting caller is blocked until the engine completes its request

    def look(self, now: float) -> bool:
        """Whether it is complete or too late."""
        return now >= self._deadline or self.complete()

    def close(self) -> None:
        """Settle it after `look`."""
        if self.complete():
            self.settle()
        else:
            self.expire(self._timeout_s)


class _Completions:
    """The works that no caller completes, and the threads that complete them.

    One thread at a time looks for complete works. Before it completes them, which may run callbacks
    that wait for other works, it lets another thread take over.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._works: list[Work] = []
        self._idle = 0
        self._looks = False
        self._seen = -1
        self._ends = False  # the process ends: no more callbacks

    def watch(self, work: Work) -> None:
        """Complete `work` as soon as possible."""
        if work.complete():  # otherwise the engine reports it from now on
            work.settle()
            return
        with self._changed:
            self._works.append(work)
            if not self._looks:
                self._need_thread()

    def _need_thread(self) -> None:
        if self._idle:
            self._changed.notify()
        else:
            threads.start_in_library(self._run, "hororing-torch", self._stop)

    def _stop(self) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._ends or (self._works and not self._looks))
                self._idle -= 1
                if self._ends:
                    return
                self._looks = True
            ready = self._next()
            with self._changed:
                self._works = [work for work in self._works if work not in ready]
                self._looks = False
                if self._works:
                    self._need_thread()
            while ready and not self._ends:
                ready.pop().close()

    def _next(self) -> list[Work]:
        """Block until works are complete or too late, and return them; none at the end."""
        while not self._ends:
            with self._changed:
                works = list(self._works)
            now = monotonic()
            if ready := [work for work in works if work.look(now)]:
                return ready
            if all(work.blocks for work in works):
                self._seen = handles.next_completion(self._seen)
            else:
                with self._changed:
                    self._changed.wait(_POLL_S)
        return []


completions = _Completions()


def _keep_works() -> None:
    """Make DDP keep the Python object of the work that it hands to C++ (in `join`).

    C++ keeps only its own part, whose `wait` would never return.
    """
    give = dist.Reducer._set_forward_pass_work_handle
    kept: MutableMapping[Any, Any] = WeakKeyDictionary()

    @functools.wraps(give)
    def give_and_keep(self: Any, work: Any, *args: Any, **kwargs: Any) -> None:
        kept[self] = work
        give(self, work, *args, **kwargs)

    dist.Reducer._set_forward_pass_work_handle = give_and_keep


_keep_works()
