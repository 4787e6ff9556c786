"""The step in progress of one optimizer: its passes, what is queued, and what is in flight.

A pass is one call of `backward()` in which a hook has run. Autograd reports its end through a
callback of a graph task: that of the call or, inside a reentrant checkpoint, that of a nested call.
When a nested task ends, the pass continues, and the callback is queued again at the outer task's
next node. A pass that raises drops its callback, whose destructor reports the failure.

A `Step` knows no parameter and no reducer. It tells a listener what happens.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from threading import get_ident
from typing import Any, Final, Protocol

import torch

from hororing._engine import timeline
from hororing._requests.handles import HOST
from hororing._requests.persistent import start_many
from hororing._tensors import Queue
from hororing.torch._optimizer.weights import Weights
from hororing.torch._tensor.uncompiled import uncompiled
from hororing.torch._tensor.verbs import adapter

# Gradients are sent in batches of this many bytes; each gradient counts at least MIN_SHARE. The
# first batch of a backward pass is one gradient, to start the engine early; each further one is
# twice as large, up to the limit.
BATCH_BYTES: Final = 256 << 10
MIN_SHARE: Final = 1 << 10

queue_callback: Final = torch.autograd.Variable._execution_engine.queue_callback


class Phase(Enum):
    """The phases of a step."""

    IDLE = "no hook has fired since the last step"
    FILLING = "a hook has fired"
    FAILED = "a backward pass has raised"
    SENT = "all gradients are sent, and some of them may be waited for"
    REDUCED = "all gradients are reduced, and no hook has fired since"


class Listener(Protocol):
    """What reduces the gradients of a step."""

    def begin_pass(self, name: str) -> None: ...  # its first hook has fired, that of `name`
    def pass_ended(self) -> None: ...  # `ended` counts it
    def pass_failed(self) -> None: ...
    def gradient_repeated(self) -> None: ...  # it was changed in flight: its hook fired too early


class _TaskEnd:
    """The callback at the end of a graph task. A failed task drops it without calling it."""

    __slots__ = ("_step", "_task")

    def __init__(self, step: Step, task: int) -> None:
        self._step: Step | None = step
        self._task = task

    def __call__(self) -> None:
        step, self._step = self._step, None
        assert step is not None
        step.task_ended(self._task)

    def __del__(self) -> None:
        if self._step is not None:
            self._step.task_failed(self._task)


class Step(Queue):
    """Everything that lives for one step. Only its hooks are thread-safe: they may run on several.

    `listener` is None once its optimizer is gone.
    """

    thread: int  # the one that runs hooks in one of `tasks`
    # Of Gradient, which knows its step. Hooks append without the lock; it is emptied under it.
    queued: list[Any]

    def __init__(self, passes: int, weights: Weights, listener: Listener) -> None:
        self.listener: Listener | None = listener
        self.weights = weights
        # What a guard does with a gradient, by its name, that the engine does not look at.
        self.look: Callable[[str, torch.Tensor], None] | None = None
        self.phase = Phase.IDLE
        self.begun = 0  # passes, of all steps
        self.passes = passes  # per step
        self.ended = 0  # of them
        self.tasks: dict[int, int] = {}  # graph tasks that have not ended, with their threads
        self.is_last = False  # the current pass is the step's last one, and the only one
        self._nested = False  # a nested task has ended, but not the pass
        self.began_s = 0.0  # when the current pass began
        self.tracing = False
        self.on_device = False  # whether a gradient is on a device
        self.queued = []
        self.batch_bytes = self.bytes_left = MIN_SHARE  # of the batch
        self._lock = threading.Lock()
        self.pending: list[int] = []  # handles of started requests that nobody has waited for
        self.unclassified: list[Any] = []  # gradients that wait for the end of a pass
        self.failures: list[Exception] = []
        self.versions: list[tuple[str, torch.Tensor, int]] = []  # as left by a failed pass

    # -- passes -----------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Begin to fill the queue."""
        self.phase = Phase.FILLING
        self.tracing = timeline.enabled()
        self.batch_bytes = self.bytes_left = MIN_SHARE
        self.began_s = time.perf_counter()

    def reset_passes(self) -> None:
        """Forget all passes."""
        self.tasks.clear()
        self.thread = self.ended = 0
        self._nested = False

    @uncompiled
    def note_task(self, name: str) -> None:
        """Note a graph task, called by its first hook on this thread, that of `name`."""
        task, thread = torch._C._current_graph_task_id(), get_ident()
        if task not in self.tasks:
            if not self.tasks and not self._nested and self.listener is not None:
                self.begun += 1
                self.listener.begin_pass(name)
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
            return
        self.ended += 1
        if self.listener is not None:
            self.listener.pass_ended()

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
        if self.listener is not None:
            self.listener.pass_failed()

    def classify(self) -> None:
        """At the end of a pass, let hooks send those gradients that they may send."""
        self.unclassified = [each for each in self.unclassified if not each.classify()]

    @uncompiled
    def weigh(
        self, name: str, param: weakref.ref[torch.Tensor], grad: torch.Tensor
    ) -> torch.Tensor | None:
        """Weigh what a pass is about to add, unless it is the only pass: a hook of `param`."""
        to = param()
        if self.passes == 1 or self.weights.weight is None or to is None or _is_captured():
            return None
        if self.thread != get_ident():
            self.note_task(name)
        return self.weights.weigh(to, grad)

    # -- the queue --------------------------------------------------------------------------------

    @uncompiled
    def send_queued(self) -> None:
        """Send the queue. An error is raised after everything else has been sent."""
        with self._lock:
            queued = self.queued[:]
            del self.queued[: len(queued)]
            self.batch_bytes = self.bytes_left = min(2 * self.batch_bytes, BATCH_BYTES)
        failures: list[Exception] = []
        if self.tracing:
            for gradient in queued:
                begin_ns = timeline.now_ns()
                gradient.send_alone(gradient.take(), failures, begin_ns)
        elif self.on_device:
            self._send_together(queued, failures)
        else:
            adapter.plain_gradients.send_gradients(queued, self.pending, failures)
        if failures:
            raise failures[0]

    def _send_together(self, queued: list[Any], failures: list[Exception]) -> None:
        """Like `PlainTensors.send_gradients`, also for gradients on a device."""
        plain: list[tuple[Any, torch.Tensor]] = []
        for gradient in queued:
            grad = gradient.take()
            if grad is None or not gradient.is_plain(grad):
                gradient.send_alone(grad, failures)
            else:
                if self.look is not None and gradient.device != HOST:
                    self.look(gradient.name, grad)
                plain.append((gradient, grad))
        while plain:
            gradients, grads = zip(*plain, strict=True)
            addresses = [grad.data_ptr() for grad in grads]
            count, code = start_many(gradients, addresses, grads, self.pending)
            if count < len(plain):
                failures.append(gradients[count].failure(code))
            del plain[: count + 1]

    def drop_queue(self) -> None:
        """Forget the gradients that were not sent."""
        with self._lock:
            for gradient in self.queued:
                gradient.param = None
            self.queued.clear()

    # -- failures, and the end --------------------------------------------------------------------

    def repeated(self, name: str) -> None:
        """Note that a pass has changed the gradient of `name` while it is in flight."""
        self.failures.append(_changed_in_flight(name))
        if self.listener is not None:
            self.listener.gradient_repeated()

    def check_versions(self) -> None:
        """Note the gradients that were changed since a pass failed."""
        for name, grad, version in self.versions:
            if grad._version != version:
                self.failures.append(_changed_in_flight(name))
        self.versions = []

    def refuse_unsent(self, what: str) -> None:
        """AssertionError if there are gradients of this rank alone."""
        if self.phase in (Phase.FILLING, Phase.FAILED):
            raise AssertionError(
                f"optimizer: {what} with gradients of this rank alone, after {self.ended} of "
                f"{self.passes} backward passes; first call optimizer.synchronize(), which reduces "
                "them"
            )

    def await_device(self) -> None:
        """Block until the gradients are reduced on the device, not only in stream order."""
        if self.on_device:
            torch.cuda.current_stream().synchronize()

    def end(self) -> list[Exception]:
        """End the step, whose gradients are reduced; return its failures."""
        # An interrupt may come before everything is reset.
        self.phase = Phase.IDLE if self.failures else Phase.REDUCED
        failures, self.failures = self.failures, []
        if self.queued:
            self.drop_queue()
        self.reset_passes()
        return failures

    def abandon(self) -> None:
        """Forget the step."""
        self.weights.abandon()
        self.pending.clear()
        self.drop_queue()
        self.reset_passes()
        self.phase = Phase.IDLE
        self.failures, self.versions = [], []


@contextlib.contextmanager
def collect(failures: list[Exception]) -> Iterator[None]:
    """Append an error to `failures` instead of raising it."""
    try:
        yield
    except Exception as error:  # the caller raises it
        failures.append(error)


def _is_captured() -> bool:
    """Return whether the hook of a parameter is called by `torch.autograd.grad`, not `backward`."""
    node = torch._C._current_autograd_node()
    if node is None:
        raise NotImplementedError(
            "optimizer: weight and backward_passes_per_step cannot be used with compiled autograd, "
            "which does not tell when a pass ends; compile only the model"
        )
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch does not answer this for parameters that it captures
        return True
    return False


def _changed_in_flight(name: str) -> AssertionError:
    return AssertionError(
        f"gradient of '{name}' was changed while it was being reduced, so ranks have "
        "different values; call optimizer.zero_grad() and start the step again, on all ranks"
    )


def describe_in_flight(names: list[str]) -> str:
    """Return the end of a sentence: gradients are in flight, and the remedy."""
    return (
        f"{len(names)} gradients, '{names[0]}' the first, are being reduced: a backward pass was "
        "not finished on this rank. Other ranks may wait for the rest of them; first call "
        "optimizer.synchronize(), which reduces the gradients of this rank"
    )


def unexpected_pass(name: str, passes: int, why: str) -> AssertionError:
    """The error for a backward pass that was not expected before a step."""
    return AssertionError(
        f"gradient of '{name}' was computed more than backward_passes_per_step ({passes}) times "
        f"before step(): the existing gradients {why}; raise backward_passes_per_step, or "
        "call optimizer.step() or optimizer.zero_grad() (of the optimizer, not of the model) "
        "first"
    )
