"""Backward passes of an optimizer: when one begins, ends or fails.

A pass is one call of `backward()` in which a hook has run. Autograd reports its end through a
callback of a graph task: that of the call or, inside a reentrant checkpoint, that of a nested call.
When a nested task ends, the pass continues, and the callback is queued again at the outer task's
next node. A pass that raises drops its callback, whose destructor reports the failure.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from enum import Enum
from threading import get_ident
from typing import Any, Final

import torch

from hororing._tensors import Queue
from hororing.torch._tensor.uncompiled import uncompiled

queue_callback: Final = torch.autograd.Variable._execution_engine.queue_callback


class Phase(Enum):
    """The phases of a reducer, from one step to the next."""

    IDLE = "no hook has fired since the last step"
    FILLING = "a hook has fired"
    FAILED = "a backward pass has raised"
    SENT = "all gradients are sent, and some of them may be waited for"
    REDUCED = "all gradients are reduced, and no hook has fired since"


class _TaskEnd:
    """The callback at the end of a graph task. A failed task drops it without calling it."""

    __slots__ = ("_passes", "_task")

    def __init__(self, passes: Passes, task: int) -> None:
        self._passes: Passes | None = passes
        self._task = task

    def __call__(self) -> None:
        passes, self._passes = self._passes, None
        assert passes is not None
        passes.task_ended(self._task)

    def __del__(self) -> None:
        if self._passes is not None:
            self._passes.task_failed(self._task)


class Passes(Queue):
    """Counts the backward passes of a step. Hooks may run on several threads."""

    thread: int  # the one that runs hooks in one of `tasks`

    def __init__(self, passes: int) -> None:
        self.passes = passes  # per step
        self.ended = 0  # of them
        self.tasks: dict[int, int] = {}  # graph tasks that have not ended, with their threads
        self.is_last = False  # the current pass is the step's last one, and the only one
        self._nested = False  # a nested task has ended, but not the pass

    @abstractmethod
    def begin_pass(self, name: str) -> None:
        """Note the first hook of a pass, that of `name`."""

    @abstractmethod
    def pass_ended(self) -> None:
        """Note the end of a pass: `ended` counts it."""

    @abstractmethod
    def pass_failed(self) -> None:
        """Note that a pass has raised."""

    def reset_passes(self) -> None:
        """Forget all passes."""
        self.tasks.clear()
        self.thread = self.ended = 0
        self._nested = False

    @uncompiled
    def note_task(self, name: str) -> None:
        """Note a graph task, at its first hook in this thread, that of `name`."""
        task, thread = torch._C._current_graph_task_id(), get_ident()
        if task not in self.tasks:
            if not self.tasks and not self._nested:
                self.begin_pass(name)
            self.tasks[task] = thread
            queue_callback(_TaskEnd(self, task))
            alone = len(set(self.tasks.values())) == 1  # tasks of one thread are nested
            self.is_last = alone and self.ended + 1 == self.passes
        self.thread = thread

    @uncompiled
    def task_ended(self, task: int) -> None:
        """End the backward pass, unless `task` is nested in it."""
        self.thread = 0
        self.tasks.pop(task, None)
        outer = torch._C._current_autograd_node()
        self._nested = outer is not None
        if outer is not None:
            self._watch_outer_task(outer)
        else:
            self.ended += 1
            self.pass_ended()

    def _watch_outer_task(self, node: Any) -> None:
        """Watch for the end of the task that executes `node`, which calls backward()."""
        handles: list[Any] = []

        def outside(_: Any) -> None:
            for handle in handles:
                handle.remove()
            self.note_task("")

        for following, _ in node.next_functions:
            if following is not None:
                handles.append(following.register_prehook(outside))

    def task_failed(self, task: int) -> None:
        """Note that the end of `task` will not be reported."""
        self.tasks.pop(task, None)
        self.thread = 0
        self.pass_failed()


@contextlib.contextmanager
def collect(failures: list[Exception]) -> Iterator[None]:
    """Append an error to `failures` instead of raising it."""
    try:
        yield
    except Exception as error:  # the caller raises it
        failures.append(error)
