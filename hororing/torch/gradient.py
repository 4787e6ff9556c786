"""One gradient on its way: from the hook into the core and back into `param.grad`.

A `Slot` per parameter holds all that can be computed once, so that the hook (thread: whichever
runs autograd) does little. Hooks put small gradients on the list of what the slots of an optimizer
have in common (`Shared`); one call of the core submits what is there when that is enough, and when
the backward pass ends, since other ranks may wait for it. Large ones go at once. On a device the
core records one event per batch and stream, behind all that its hooks ran behind.

Note [Backward passes]. A pass is one call of `backward()` in which a hook has run. Autograd tells
when it ends by a callback that belongs to a graph task: that of the call, or, inside a reentrant
checkpoint, that of a call within it. When a task within ends, the pass goes on, and the task around
it is asked as soon as it does something. A pass that raises drops its callback, which tells, too.

A gradient may come several times in one pass, once from each reentrant checkpoint that uses the
parameter. So a gradient is sent by its hook only if it came once in a pass before; the others are
sent when the pass ends.

Ownership: parameter -> hook -> slot -> (in flight only) gradient. Slots hold no parameter, so
nothing here keeps a model alive. See hororing/torch/reducer.py for who drives them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from threading import get_ident
from typing import Any, Final, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from hororing import arguments, collectives, timeline
from hororing._tensors import Arrivals, Gradient, send_gradients
from hororing.collectives import HOST
from hororing.compression import NoneCompressor
from hororing.errors import DuplicateNameError
from hororing.failures import fail
from hororing.prepared import PreparedAllreduce, start_many
from hororing.process_sets import ProcessSet, check_member
from hororing.reduction import Reduction
from hororing.torch.adapter import DTYPES
from hororing.torch.ops import start_sparse_allreduce, synchronize
from hororing.torch.submission import BATCH_BYTES, LEAST_WEIGHT, Group
from hororing.torch.uncompiled import uncompiled
from hororing.torch.verbs import adapter, verbs

BY_OWNER: Final = 2  # of Slot.left: `Slot.count` decides; so do all numbers but 0 and 1

queue_callback: Final = torch.autograd.Variable._execution_engine.queue_callback


class _End:
    """The callback at the end of a graph task. One that fails drops it without a call."""

    __slots__ = ("_shared", "_task")

    def __init__(self, shared: Shared, task: int) -> None:
        self._shared: Shared | None = shared
        self._task = task

    def __call__(self) -> None:
        shared, self._shared = self._shared, None
        assert shared is not None
        shared.task_ended(self._task)

    def __del__(self) -> None:
        if self._shared is not None:
            self._shared.task_failed(self._task)


class Owner(Protocol):
    """What slots ask of the reducer that they belong to."""

    def forget_failed_pass(self) -> None:
        """Forget the gradients of a pass that was not finished. AssertionError if some are sent."""

    def came_again(self, slot: Slot) -> None:
        """Learn anew how often gradients come; that of `slot` is spoilt."""

    def pass_failed(self) -> None:
        """Take note that a pass has raised."""

    def pass_ended(self, is_last: bool) -> None:
        """Take note of the end of a pass, if `is_last` the last one of a step."""


class Shared(Arrivals):
    """What the slots of one optimizer have in common."""

    __slots__ = (
        "batch_bytes", "begun", "ended", "failed", "finishing", "flying",
        "generation", "is_last", "lock",
        "members", "nested", "on_device", "options", "owner", "passes", "synchronized", "tasks",
        "tracing", "unproven",
    )  # fmt: skip

    arrived: list[Slot]
    thread: int  # that runs hooks in one of `tasks`

    def __init__(self, options: Reduction, passes: int, owner: Callable[[], Owner | None]) -> None:
        self.options = options
        self.members = check_member(options.process_set, "DistributedOptimizer")
        self.generation = options.process_set.generation
        self.owner = owner
        self.passes = passes  # backward passes per step
        self.ended = 0  # of them
        self.tasks: dict[int, int] = {}  # graph tasks whose end will be told, with their threads
        self.is_last = False  # the pass under way is the step's last one, and the only one
        self.nested = False  # a task within a pass has ended, and the pass has not
        self.failed = False  # a pass, since the last `rest`
        self.unproven: list[Slot] = []  # those that wait for the end of a pass
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
    def first_hook(self, name: str) -> None:
        """Take note of a graph task, by its first hook in this thread, that of `name`."""
        task, thread = torch._C._current_graph_task_id(), get_ident()
        if task not in self.tasks:
            if not self.tasks and not self.nested:
                self._begin_pass(name)
            self.tasks[task] = thread
            queue_callback(_End(self, task))
            alone = len(set(self.tasks.values())) == 1  # tasks of one thread are nested
            self.is_last = alone and self.ended + 1 == self.passes
        self.thread = thread

    def _begin_pass(self, name: str) -> None:
        owner = self.owner()
        if owner is not None and (self.failed or self.finishing):
            owner.forget_failed_pass()
        if self.ended >= self.passes:
            op = arguments.op_name(self.options.op)
            raise one_pass_too_many(
                name, self.passes, f"would be reduced again, which op={op} does not allow"
            )
        self.check_set()
        self.synchronized = self.failed = self.finishing = False
        self.tracing = timeline.enabled()
        self.begun = True
        self.batch_bytes = self.room = LEAST_WEIGHT

    @uncompiled
    def task_ended(self, task: int) -> None:
        """End the backward pass, if `task` is not one within it."""
        self.thread = 0
        self.tasks.pop(task, None)
        outer = torch._C._current_autograd_node()
        if outer is not None:
            self._ask_outer_task(outer)
            return
        self.nested = False
        self.ended += 1
        self.unproven = [slot for slot in self.unproven if not slot.prove()]
        if self.ended >= self.passes and (self.tasks or self.ended > self.passes):
            raise AssertionError(
                "optimizer: backward passes of several threads at once; pass "
                "backward_passes_per_step=their number, and gradients are reduced when the last "
                "of them ends"
            )
        owner = self.owner()
        if owner is not None:
            owner.pass_ended(self.ended == self.passes)

    def _ask_outer_task(self, node: Any) -> None:
        """Be called at the end of the task that carries out `node`, which calls backward()."""
        self.nested = True
        handles: list[Any] = []

        def outside(_: Any) -> None:
            for handle in handles:
                handle.remove()
            self.first_hook("")

        for following, _ in node.next_functions:
            if following is not None:
                handles.append(following.register_prehook(outside))

    def task_failed(self, task: int) -> None:
        """Take note that no end of `task` will come."""
        self.tasks.pop(task, None)
        self.thread = 0
        self.failed = True
        owner = self.owner()
        if owner is not None:
            owner.pass_failed()

    def check_set(self) -> None:
        """Raise unless the process set is the one that it was: numbers of sets are used again."""
        process_set = self.options.process_set
        members = check_member(process_set, "DistributedOptimizer")
        if (members, process_set.generation) != (self.members, self.generation):
            raise another_set(process_set)

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

    def rest(self) -> None:
        """Be ready for the next step. REQUIRES: nothing is in flight."""
        self.drop_arrived()
        self.flying.clear()
        self.tasks.clear()
        self.thread = self.ended = 0
        self.begun = self.finishing = self.failed = self.nested = False


class Slot(Gradient):
    """The gradient of one parameter. Its hook, `on_gradient`, is in csrc/python/gradients.cc."""

    __slots__ = (
        "device", "dtype", "finish_general", "group", "handle", "hook", "name", "position",
        "proven", "seen", "shape", "sparse_dims", "torch_device",
    )  # fmt: skip

    shared: Shared
    prepared: PreparedAllreduce | None
    param: torch.Tensor | None  # while the gradient has arrived and is not sent

    def __init__(self, name: str, param: torch.Tensor, shared: Shared) -> None:
        self.name = name
        self.shared = shared
        self.left = BY_OWNER
        self.seen = 0  # how often it has come; in one pass, while it is not proven
        self.proven = False  # it came once in a pass
        shared.unproven.append(self)
        self.weight = BATCH_BYTES  # what it takes of Shared.room: sent at once
        self.sparse_dims = 0  # of the latest gradient that was sparse
        self.hook: RemovableHandle | None = None
        self.group: Group | None = None
        self.position = 0  # in the group
        self.dtype, self.shape = param.dtype, param.shape
        # In flight by the general way: its handle (0 in a group) and how to end it.
        self.handle = 0
        self.finish_general: Callable[[], torch.Tensor] | None = None
        options = shared.options
        self.device = verbs.adapter.device(param)
        self.torch_device = param.get_device()
        shared.on_device = shared.on_device or self.device != HOST
        if options.compression is NoneCompressor and param.dtype in DTYPES:
            self.prepared = PreparedAllreduce(
                name, DTYPES[param.dtype], param.shape, options.op, *options.factors,
                process_set=shared.members, device=self.device,
            )  # fmt: skip
            self.weight = max(param.nbytes, LEAST_WEIGHT)
            self.simple = self.device == HOST

    def join(self, group: Group, position: int) -> None:
        """Be reduced with the others of `group`."""
        self.group, self.position, self.simple = group, position, False

    # -- in the hook --------------------------------------------------------------------------

    def note_stream(self) -> None:
        """Note that this thread's stream computes the gradient: it may be sent in another's."""
        if self.prepared is not None and self.device != HOST:
            self.prepared.request.stream = self.stream()

    @uncompiled
    def weight_of(self, param: torch.Tensor) -> int:
        """Return what the gradient takes of Shared.room; on a device note its stream, too.

        Who has to compute from it before it is sent does so in this stream, so at once.
        """
        if self.device == HOST:
            return self.weight
        self.note_stream()
        return self.weight if param.grad is not None and self.is_plain(param.grad) else BATCH_BYTES

    @uncompiled
    def count(self) -> bool:
        """Take note of a gradient that is not to be sent at once; whether it is nevertheless.

        A pass that is captured into a CUDA graph is none: when the graph is replayed no hook comes,
        and `synchronize` sends all gradients.
        """
        shared = self.shared
        if self.device != HOST and torch.cuda.is_current_stream_capturing():
            return False
        if shared.thread != get_ident():
            shared.first_hook(self.name)
        if self.left == 0:
            self._wait_for_ends()
            return False
        self.seen += 1
        return self.proven and shared.is_last

    def _wait_for_ends(self) -> None:
        """Go at the end of passes from now on: it has come a second time in this one."""
        if self.proven:
            self.proven = False
            self.shared.unproven.append(self)
        self.seen = 2
        if self.sent:
            owner = self.shared.owner()
            if owner is not None:
                owner.came_again(self)
            raise AssertionError(
                f"gradient of '{self.name}' came again in the same backward pass while it was "
                "being reduced: several reentrant checkpoints use this parameter, which did not "
                "happen in the passes before. Call optimizer.synchronize() and start the step "
                "again: the optimizer knows it now. Or pass use_reentrant=False to the checkpoints"
            )

    def prove(self) -> bool:
        """At the end of a pass: whether the gradient may go when it comes, from now on."""
        self.proven = self.seen == 1
        return self.proven

    def take_gradient(self) -> torch.Tensor | None:
        """Return the gradient that has arrived."""
        param, self.param = self.param, None
        assert param is not None
        return param.grad

    def send_alone(
        self, grad: torch.Tensor | None, failures: list[Exception], begin_ns: int = 0
    ) -> None:
        """Do as `send`, but put an error into `failures`; draw HOOK from `begin_ns`, if any."""
        try:
            self.send(grad)
            if begin_ns:
                timeline.trace_hook(self.name, begin_ns)
        except Exception as error:
            failures.append(self._in_hook(error))

    def failure(self, code: int) -> Exception:
        """Return the error of a request that the core has refused."""
        try:
            fail(code)
        except Exception as error:
            return self._in_hook(error)

    def _in_hook(self, error: Exception) -> Exception:
        text = str(error)
        if isinstance(error, DuplicateNameError):
            text += (
                "; if two optimizers have parameters with the same names, pass named_parameters "
                "with a different prefix to each of them"
            )
        if self.left == 0:
            passes = self.shared.passes
            place = f"gradient of '{self.name}', backward pass {passes} of {passes}"
            text += f" (in the hook: {place})"
            self.left = BY_OWNER  # another attempt is as good
        error.args = (text, *error.args[1:])
        return error

    def is_plain(self, grad: torch.Tensor) -> bool:
        """Whether it goes as it is: dense, contiguous, by itself, and of the type as declared."""
        return (
            self.prepared is not None
            and self.group is None
            and grad.layout is torch.strided
            and grad.dtype is self.dtype
            and grad.get_device() == self.torch_device  # else the model was moved meanwhile
            and grad.shape == self.shape  # as when it was declared
            and grad.is_contiguous()
        )

    def send(self, grad: torch.Tensor | None) -> None:
        """Start the reduction of `grad`, in place if it is dense and not compressed."""
        assert grad is not None
        if not self.is_plain(grad):
            self._send_general(grad)
        else:
            assert self.prepared is not None
            begin_ns = timeline.now_ns() if self.shared.tracing else 0
            address = grad.data_ptr()
            if self.shared.tracing:
                timeline.trace_view(self.name, begin_ns, grad.nbytes)
            started, code = start_many([self.prepared], [address], [grad], self.shared.flying)
            if not started:
                fail(code)
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
            if self.device != HOST:  # what has to be copied for it is copied in this stream
                dense = verbs.adapter.dense(dense)
            group.add(self.position, dense, self.stream(), options)
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
        handle, combine = start_sparse_allreduce(
            torch.sparse_coo_tensor(grad._indices(), values, grad.shape, check_invariants=False),
            self.name,
            options.op,
            options.process_set,
        )
        self.handle = handle

        def finish() -> torch.Tensor:
            result = combine(synchronize(handle))
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
        """Return what `send` was given, reduced. Nothing is in flight then: see `rest`."""
        prepared = self.prepared
        if prepared is not None and prepared.keep is not None:
            reduced: torch.Tensor = prepared.finish(self.stream())
        else:
            assert self.finish_general is not None
            reduced = self.finish_general()
            self.finish_general = lambda: reduced  # for who asks again, after an interrupt
        return reduced

    def finish(self, param: torch.Tensor) -> None:
        """Wait for the reduced gradient, leave it in `param.grad`, and rest.

        After an interrupt it is still in flight, so that who waits again does not send it again.
        """
        try:
            reduced, grad = self.wait(), param.grad
            if reduced is not grad:
                if grad is not None and grad.layout is torch.strided is reduced.layout:
                    grad.copy_(reduced)
                else:
                    param.grad = reduced
        except Exception:
            self.rest()
            raise
        self.rest()

    def stream(self) -> int:
        """Return the stream that this thread computes in, where the parameter is."""
        return 0 if self.device == HOST else verbs.adapter.stream(self.device)

    @property
    def handle_in_flight(self) -> int:
        """The core's handle of what `send` was given."""
        if self.group is not None:
            return self.group.handle
        return self.handle or (self.prepared.handle if self.prepared is not None else 0)

    def rest(self) -> None:
        """Be ready for the next step. REQUIRES: nothing is in flight."""
        self.sent = False
        self.left = self.shared.passes if self.proven else BY_OWNER
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


def another_set(process_set: ProcessSet) -> ValueError:
    """The error where an optimizer was made for the set as it was before."""
    return ValueError(
        f"DistributedOptimizer: its process set was removed and registered again, now as "
        f"{process_set}; make the optimizer again, too"
    )


def one_pass_too_many(name: str, passes: int, why: str) -> AssertionError:
    """The error where a backward pass comes that was not expected before a step."""
    return AssertionError(
        f"gradient of '{name}' was computed more than backward_passes_per_step ({passes}) times "
        f"before step(): the existing gradients {why}; raise backward_passes_per_step, or "
        "call optimizer.step() or optimizer.zero_grad() (of the optimizer, not of the model) "
        "first"
    )


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
