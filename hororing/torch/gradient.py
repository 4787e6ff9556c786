"""One gradient on its way: from the hook into the core and back into `param.grad`.

A `Slot` per parameter holds all that can be computed once, so that the hook (thread: whichever
runs autograd) does little: it puts a small gradient on a list, and one call of the core sends what
is there when that is enough, or when the backward pass ends. Large ones are sent at once. A `Group`
joins slots that are reduced together.

Ownership: parameter -> hook -> slot -> (in flight only) gradient. Slots hold no parameter, so
nothing here keeps a model alive. See hororing/torch/reducer.py for who drives them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Final, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from hororing import collectives
from hororing.collectives import PreparedAllreduce
from hororing.compression import Compressor, NoneCompressor
from hororing.process_sets import ProcessSet, check_member
from hororing.torch.adapter import DTYPES
from hororing.torch.ops import start_sparse_allreduce, synchronize
from hororing.torch.uncompiled import uncompiled
from hororing.torch.verbs import verbs


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


class Shared:
    """What the slots of one optimizer have in common."""

    __slots__ = (
        "arrived", "awaits_end", "batch_bytes", "begun", "lock", "members", "options", "passes",
        "room", "synchronized", "tracing",
    )  # fmt: skip

    def __init__(self, options: Options, passes: int) -> None:
        self.options = options
        self.members = check_member(options.process_set, "DistributedOptimizer")
        self.passes = passes  # backward passes per step
        self.begun = False  # a hook has fired since the last synchronize or restart
        self.synchronized = False  # gradients are reduced, and no hook has fired since
        self.tracing = False
        # Gradients that are there and not sent. Autograd may run hooks on several threads:
        # appended to without the lock, emptied with it.
        self.arrived: list[Slot] = []
        self.batch_bytes = self.room = LEAST_WEIGHT  # of the batch; of it, for more gradients
        self.lock = threading.Lock()
        self.awaits_end = False  # `backward_ended` will be called

    @uncompiled
    def first_hook(self) -> None:
        """Begin a step, or another backward pass of it."""
        if not self.begun:
            self.check_set()
            self.begun = True
            self.synchronized = False
            self.tracing = collectives.timeline_enabled()
        if not self.awaits_end:
            self.awaits_end = True
            self.batch_bytes = self.room = LEAST_WEIGHT
            torch.autograd.Variable._execution_engine.queue_callback(self.backward_ended)  # type: ignore[attr-defined]

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
        if self.tracing or len(arrived) == 1:
            for slot in arrived:
                slot.send_alone(slot.take_param().grad, failures)
        else:
            _send_together(arrived, failures)
        if failures:
            raise failures[0]

    def send_late(self, entries: list[tuple[torch.Tensor, Slot]]) -> None:
        """Send the gradients that the hooks have not; zeros where there is none."""
        self.drop_arrived()
        for param, slot in entries:
            if param.requires_grad:
                slot.ensure_gradient(param)
                slot.param = param
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
        self.begun = False


def _send_together(arrived: list[Slot], failures: list[Exception]) -> None:
    slots, prepared, addresses, grads = [], [], [], []
    for slot in arrived:
        grad = slot.take_param().grad
        if grad is None or not slot.is_plain(grad):
            slot.send_alone(grad, failures)
            continue
        slots.append(slot)
        prepared.append(slot.prepared)
        addresses.append(grad.data_ptr())
        grads.append(grad)
    begin = 0
    while begin < len(slots):
        count, code = collectives.start_many(prepared[begin:], addresses[begin:], grads[begin:])
        for slot in slots[begin : begin + count]:
            slot.sent = True
        begin += count
        if begin < len(slots):
            failures.append(slots[begin].failure(code))
            begin += 1


class Group:
    """Slots whose gradients are reduced together, when the last of them is there."""

    def __init__(self, name: str, slots: list[Slot]) -> None:
        self._name = name
        self._count = len(slots)
        self._waiting: dict[int, torch.Tensor] = {}  # by position
        self.handle = 0
        self._results: dict[int, torch.Tensor] = {}
        # Autograd may run hooks on several threads.
        self._lock = threading.Lock()
        for position, slot in enumerate(slots):
            slot.group, slot.position = self, position

    def add(self, position: int, tensor: torch.Tensor, options: Options) -> None:
        """Take the gradient of one member; send all when it is the last."""
        with self._lock:
            self._waiting[position] = tensor
            if len(self._waiting) == self._count:
                self._submit(options)

    def flush(self, options: Options) -> None:
        """Send what is there: the other members are frozen."""
        with self._lock:
            if self._waiting:
                self._submit(options)

    def _submit(self, options: Options) -> None:
        order = sorted(self._waiting)  # ranks must agree on it, and arrival differs
        tensors = [self._waiting[position] for position in order]
        self._waiting = {}
        self._results = dict(zip(order, tensors, strict=True))
        self.handle = verbs.reduce_async(
            "grouped_allreduce", tensors, True, self._name, options.op, *options.factors,
            process_set=options.process_set,
        )  # fmt: skip

    def finish(self, position: int) -> torch.Tensor:
        """Wait for the group, if nobody has yet; its error is raised once."""
        if self.handle:
            try:
                synchronize(self.handle)
            except Exception:
                self.handle = 0
                raise
            self.handle = 0
        return self._results.pop(position)

    def abandon(self) -> None:
        """Forget what is there and what is in flight."""
        if self.handle:
            collectives.abandon(self.handle, None)
        self.handle = 0
        self._waiting, self._results = {}, {}


class Slot:
    """The gradient of one parameter."""

    __slots__ = (
        "dtype", "finish_general", "group", "handle", "hook", "left", "name", "param", "position",
        "prepared", "sent", "shared", "sparse_dims", "weight",
    )  # fmt: skip

    def __init__(self, name: str, param: torch.Tensor, shared: Shared) -> None:
        self.name = name
        self.shared = shared
        self.left = shared.passes  # backward passes until the gradient is sent
        self.sent = False
        self.param: torch.Tensor | None = None  # while the gradient has arrived and is not sent
        self.weight = BATCH_BYTES  # what it takes of Shared.room: sent at once
        self.sparse_dims = 0  # of the latest gradient that was sparse
        self.hook: RemovableHandle | None = None
        self.group: Group | None = None
        self.position = 0  # in the group
        self.dtype = param.dtype
        # In flight by the general way: its handle (0 in a group) and how to end it.
        self.handle = 0
        self.finish_general: Callable[[], torch.Tensor] | None = None
        self.prepared: PreparedAllreduce | None = None
        options = shared.options
        plain = options.compression is NoneCompressor and param.device.type == "cpu"
        if plain and param.dtype in DTYPES:
            self.prepared = PreparedAllreduce(
                name, DTYPES[param.dtype], param.shape, options.op, *options.factors,
                process_set=shared.members,
            )  # fmt: skip
            self.weight = max(param.nbytes, LEAST_WEIGHT)

    # -- in the hook --------------------------------------------------------------------------

    def on_gradient(self, param: torch.Tensor) -> None:
        """Take note of an accumulated gradient, which is sent when it is the step's last.

        Called a thousand times per step: what happens rarely happens elsewhere.
        """
        shared = self.shared
        if (self.left != 1 or not shared.awaits_end) and not self.count():
            return
        self.left = 0
        self.param = param
        shared.arrived.append(self)
        shared.room -= self.weight
        if shared.room <= 0:
            shared.send_arrived()

    @uncompiled
    def count(self) -> bool:
        """Count a backward pass, all but the step's last; whether it was that."""
        shared = self.shared
        if self.left == 0:
            raise AssertionError(
                f"gradient of '{self.name}' was computed more than backward_passes_per_step "
                f"({shared.passes}) times before step() or synchronize(); raise "
                "backward_passes_per_step, or call step() before another loss uses this parameter"
            )
        shared.first_hook()
        if self.left == 1:
            return True
        self.left -= 1
        return False

    def take_param(self) -> torch.Tensor:
        """Return the parameter whose gradient has arrived; others are not held."""
        param, self.param = self.param, None
        assert param is not None
        return param

    def send_alone(self, grad: torch.Tensor | None, failures: list[Exception]) -> None:
        """Do as `send`, but put an error into `failures`."""
        try:
            if self.shared.tracing:
                begin_ns = collectives.now_ns()
                self.send(grad)
                collectives.trace_hook(self.name, begin_ns)
            else:
                self.send(grad)
        except Exception as error:
            failures.append(self._in_hook(error))

    def failure(self, code: int) -> Exception:
        """Return the error of a request that the core has refused."""
        try:
            collectives.fail(code)
        except Exception as error:
            return self._in_hook(error)

    def _in_hook(self, error: Exception) -> Exception:
        if self.left == 0:
            passes = self.shared.passes
            place = f"gradient of '{self.name}', backward pass {passes} of {passes}"
            error.args = (f"{error} (in the hook: {place})", *error.args[1:])
            self.left = 1  # another attempt is as good
        return error

    def is_plain(self, grad: torch.Tensor) -> bool:
        """Whether it goes as it is: dense, contiguous, by itself, and of the type as declared."""
        return (
            self.prepared is not None
            and self.group is None
            and grad.layout is torch.strided
            and grad.dtype is self.dtype
            and grad.is_contiguous()
        )

    def send(self, grad: torch.Tensor | None) -> None:
        """Start the reduction of `grad`, in place if it is dense and not compressed."""
        assert grad is not None
        if not self.is_plain(grad):
            self._send_general(grad)
        else:
            assert self.prepared is not None
            begin_ns = collectives.now_ns() if self.shared.tracing else 0
            address = grad.data_ptr()
            if self.shared.tracing:
                collectives.trace_view(self.name, begin_ns, grad.nbytes)
            started, code = collectives.start_many([self.prepared], [address], [grad])
            if not started:
                collectives.fail(code)
        self.sent = True

    @torch.no_grad()
    def _send_general(self, grad: torch.Tensor) -> None:
        """Do as `send` for all but dense contiguous gradients that go one by one as they are."""
        options = self.shared.options
        is_sparse = grad.layout is torch.sparse_coo
        if is_sparse:
            self.sparse_dims = grad.sparse_dim()
            if not options.sparse_as_dense:
                self._send_sparse(grad)
                return
        compression, group = options.compression, self.group
        dense, context = compression.compress(grad.to_dense() if is_sparse else grad)
        reduced: Callable[[], torch.Tensor]
        if group is not None:
            group.add(self.position, dense, options)
            reduced = partial(group.finish, self.position)
        else:
            self.handle = verbs.reduce_async(
                "allreduce", [dense], True, self.name, options.op, *options.factors, itemgetter(0),
                process_set=options.process_set,
            )  # fmt: skip
            reduced = partial(synchronize, self.handle)

        def finish() -> torch.Tensor:
            result: torch.Tensor = compression.decompress(reduced(), context)
            return result.to_sparse(self.sparse_dims) if is_sparse else result

        self.finish_general = finish

    def _send_sparse(self, grad: torch.Tensor) -> None:
        options = self.shared.options
        if self.group is not None:
            raise ValueError(
                f"gradient of '{self.name}' is sparse and in a group; pass sparse_as_dense=True "
                "or leave the parameter out of `groups`"
            )
        before, after = options.factors
        compression = options.compression
        values, context = compression.compress(grad._values() * before)
        self.handle, gathered = start_sparse_allreduce(
            torch.sparse_coo_tensor(grad._indices(), values, grad.shape, check_invariants=False),
            self.name,
            options.op,
            options.process_set,
        )

        def finish() -> torch.Tensor:
            result = gathered()
            values = compression.decompress(result._values(), context) * after
            return torch.sparse_coo_tensor(
                result._indices(), values, result.shape, check_invariants=False
            )

        self.finish_general = finish

    # -- in synchronize -----------------------------------------------------------------------

    def ensure_gradient(self, param: torch.Tensor) -> None:
        """Make a zero one where this rank has none."""
        if param.grad is None:
            sparse = self.sparse_dims > 0 and not self.shared.options.sparse_as_dense
            param.grad = self._sparse_zero(param) if sparse else torch.zeros_like(param)

    def _sparse_zero(self, param: torch.Tensor) -> torch.Tensor:
        # With as many sparse dimensions as the other ranks' gradients have.
        dims = self.sparse_dims
        return torch.sparse_coo_tensor(
            torch.zeros(dims, 0, dtype=torch.int64, device=param.device),
            param.new_zeros(0, *param.shape[dims:]),
            param.shape,
            check_invariants=False,
        )

    def wait(self) -> torch.Tensor:
        """Return what `send` was given, reduced."""
        prepared = self.prepared
        try:
            if prepared is not None and prepared.keep is not None:
                reduced: torch.Tensor = prepared.finish()
            else:
                assert self.finish_general is not None
                reduced = self.finish_general()
        finally:
            self.rest()
        return reduced

    def finish(self, param: torch.Tensor) -> None:
        """Wait for the reduced gradient and leave it in `param.grad`."""
        reduced, grad = self.wait(), param.grad
        if reduced is grad:
            return
        if grad is not None and grad.layout is torch.strided is reduced.layout:
            grad.copy_(reduced)
        else:
            param.grad = reduced

    @property
    def handle_in_flight(self) -> int:
        """The core's handle of what `send` was given."""
        if self.group is not None:
            return self.group.handle
        return self.handle or (self.prepared.handle if self.prepared is not None else 0)

    def rest(self) -> None:
        """Be ready for the next step. REQUIRES: nothing is in flight."""
        self.sent = False
        self.left = self.shared.passes
        self.handle = 0
        self.finish_general = None

    def abandon(self) -> None:
        """Forget what is in flight."""
        if self.prepared is not None:
            self.prepared.abandon()
        if self.handle:
            collectives.abandon(self.handle, None)
        if self.group is not None:
            self.group.abandon()
        self.rest()
