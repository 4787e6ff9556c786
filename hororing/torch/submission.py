"""What the gradients of one optimizer have in common, and how they are submitted together.

Hooks put small gradients on a list; one call of the core submits what is there when that is enough,
and when the backward pass ends, since other ranks may wait for it. Large ones go at once.
On a device the core records one event per batch and stream, behind all that its hooks ran behind.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from hororing import timeline
from hororing._tensors import Arrivals, send_gradients
from hororing.compression import Compressor
from hororing.prepared import PreparedAllreduce, start_many
from hororing.process_sets import ProcessSet, check_member
from hororing.torch.uncompiled import uncompiled
from hororing.torch.verbs import adapter

if TYPE_CHECKING:
    from hororing.torch.gradient import Slot


class Options(NamedTuple):
    """How gradients are reduced."""

    compression: type[Compressor]
    op: int
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet

    @property
    def factors(self) -> tuple[float, float]:
        """Factors before and after the reduction."""
        return 1.0 / self.predivide, self.predivide


# Gradients are sent in batches of so many bytes, each at least so heavy. The first batch of a
# backward pass is one gradient, so that the engine has something to do; each is twice as large as
# the one before until they are full.
BATCH_BYTES: Final = 256 << 10
LEAST_WEIGHT: Final = 1 << 10


class Shared(Arrivals):
    """What the slots of one optimizer have in common."""

    __slots__ = (
        "batch_bytes", "begun", "finishing", "flying", "lock", "members", "on_device", "options",
        "passes", "synchronized", "tracing",
    )  # fmt: skip

    arrived: list[Slot]
    awaits_end: bool  # `backward_ended` will be called

    def __init__(self, options: Options, passes: int) -> None:
        self.options = options
        self.members = check_member(options.process_set, "DistributedOptimizer")
        self.passes = passes  # backward passes per step
        self.begun = False  # a hook has fired since the last synchronize or restart
        self.synchronized = False  # gradients are reduced, and no hook has fired since
        self.tracing = False
        # Gradients that are there and not sent. Autograd may run hooks on several threads:
        # appended to without the lock, emptied with it.
        self.arrived = []
        self.batch_bytes = self.room = LEAST_WEIGHT  # of the batch; of it, for more gradients
        self.flying: list[int] = []  # handles that nobody has waited for
        self.finishing = False  # all is sent, some of it may be waited for: between two `rest`s
        self.on_device = False  # whether a parameter lies there
        self.lock = threading.Lock()

    @uncompiled
    def first_hook(self) -> None:
        """Begin a step, or another backward pass of it."""
        with self.lock:
            if not self.begun or self.finishing:  # of a step that was interrupted at its end
                self.finishing = False
                self.check_set()
                self.synchronized = False
                self.tracing = timeline.enabled()
                self.begun = True
        if not self.awaits_end:
            self.awaits_end = True
            self.batch_bytes = self.room = LEAST_WEIGHT
            torch.autograd.Variable._execution_engine.queue_callback(self.backward_ended)

    def check_set(self) -> None:
        """Raise unless the process set is the one that it was: numbers of sets are used again."""
        if check_member(self.options.process_set, "DistributedOptimizer") != self.members:
            raise ValueError(
                f"DistributedOptimizer: its process set was removed and registered again, now as "
                f"{self.options.process_set}; make the optimizer again, too"
            )

    @uncompiled
    def backward_ended(self) -> None:
        """Send the rest: nothing more will come, and other ranks may wait for it."""
        self.awaits_end = False
        if self.arrived:
            self.send_arrived()

    @uncompiled
    def send_arrived(self) -> None:
        """Start the reduction of what has arrived. An error is raised when all else is sent."""
        with self.lock:
            arrived = self.arrived[:]
            del self.arrived[: len(arrived)]
            self.batch_bytes = self.room = min(2 * self.batch_bytes, BATCH_BYTES)
        failures: list[Exception] = []
        if self.tracing:
            for slot in arrived:
                begin_ns = timeline.now_ns()
                slot.send_alone(slot.take_gradient(), failures, begin_ns)
        elif self.on_device:
            _send_together(arrived, self.flying, failures)
        else:
            send_gradients(adapter.plain_gradients, arrived, self.flying, failures)
        if failures:
            raise failures[0]

    def send_late(self, entries: list[tuple[torch.Tensor, Slot]]) -> None:
        """Send the gradients that the hooks have not; zeros where there is none."""
        self.drop_arrived()
        for param, slot in entries:
            if param.requires_grad:
                slot.ensure_gradient(param)
                slot.param = param
                slot.note_stream()
                self.arrived.append(slot)
        if self.arrived:
            self.send_arrived()

    def drop_arrived(self) -> None:
        """Forget what is not sent."""
        with self.lock:
            for slot in self.arrived:
                slot.param = None
            self.arrived.clear()
            self.awaits_end = False

    def rest(self) -> None:
        """Be ready for the next step. REQUIRES: nothing is in flight."""
        self.drop_arrived()
        self.flying.clear()
        self.begun = self.finishing = False


def _send_together(arrived: list[Slot], flying: list[int], failures: list[Exception]) -> None:
    slots, addresses, grads = [], [], []
    prepared: list[PreparedAllreduce] = []
    for slot in arrived:
        grad = slot.take_gradient()
        if grad is None or not slot.is_plain(grad):
            slot.send_alone(grad, failures)
            continue
        assert slot.prepared is not None
        slots.append(slot)
        prepared.append(slot.prepared)
        addresses.append(grad.data_ptr())
        grads.append(grad)
    begin = 0
    while begin < len(slots):
        count, code = start_many(prepared[begin:], addresses[begin:], grads[begin:], flying)
        for slot in slots[begin : begin + count]:
            slot.sent = True
        begin += count
        if begin < len(slots):
            failures.append(slots[begin].failure(code))
            begin += 1
