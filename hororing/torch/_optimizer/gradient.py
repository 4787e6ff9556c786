"""A gradient's path: from the hook into the core and back into `param.grad`.

A `Gradient` per parameter holds everything that can be computed once, so that its hook, on any of
autograd's threads, has little to do. Its `State` (_requests/persistent.py) determines what the hook
does. READY: the hook queues the gradient, and the reducer sends its queue once that is large
enough; large gradients are sent at once. ASK: the hook does so only if `may_send` agrees; the
others are sent at the end of the pass. On a device the core records one event per batch and stream,
after all work before its hooks.

A gradient may be accumulated several times in one pass, once by each reentrant checkpoint that uses
the parameter. So its hook sends it only if an earlier pass had one accumulation; the others are
sent at the end of the pass.

Ownership: parameter -> hook -> gradient -> reducer -> parameter, until the reducer removes the
hooks, when its optimizer is deleted. hororing/torch/_optimizer/reducer.py sends and waits.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from threading import get_ident
from typing import TYPE_CHECKING

import torch
from torch.utils.hooks import RemovableHandle

from hororing._engine import timeline
from hororing._engine.core import fail
from hororing._requests.compression import NoneCompressor
from hororing._requests.handles import HOST
from hororing._requests.persistent import ASK, QUEUED, READY, SENT, PersistentAllreduce, start_many
from hororing._requests.process_sets import ProcessSet
from hororing.errors import DuplicateNameError
from hororing.torch._optimizer.submission import BATCH_BYTES, MIN_SHARE, Group
from hororing.torch._tensor.adapter import REDUCED
from hororing.torch._tensor.uncompiled import uncompiled
from hororing.torch._tensor.verbs import verbs
from hororing.torch.ops import start_sparse_allreduce, synchronize

if TYPE_CHECKING:
    from hororing.torch._optimizer.reducer import Reducer


class Gradient(PersistentAllreduce):
    """The gradient of one parameter. Its hook, `on_gradient`, is in csrc/python/gradients.cc."""

    __slots__ = (
        "dtype",
        "finish_general",
        "fires_once",
        "group",
        "hook",
        "name",
        "position",
        "pre_hook",
        "seen",
        "shape",
        "sparse_dims",
        "torch_device",
    )  # fmt: skip

    reducer: Reducer
    param: torch.Tensor | None  # while the gradient is queued

    def __init__(self, name: str, param: torch.Tensor, reducer: Reducer) -> None:
        super().__init__(verbs.adapter.device(param))
        self.name = name
        self.reducer = reducer
        self.seen = 0  # number of accumulations; within one pass until it is classified
        self.fires_once = False  # a pass had only one accumulation, so its hook may send it
        self.share = BATCH_BYTES  # its share of the queue's bytes_left
        self.sparse_dims = 0  # of the latest gradient that was sparse
        self.hook: RemovableHandle | None = None
        self.pre_hook: RemovableHandle | None = None  # of several weighted passes
        self.group: Group | None = None
        self.position = 0  # in the group
        self.dtype, self.shape = param.dtype, param.shape
        self.torch_device = param.get_device()
        # How to wait for it if it is in flight without the persistent request.
        self.finish_general: Callable[[], torch.Tensor] | None = None
        options = reducer.options
        if options.compression is NoneCompressor and param.dtype in REDUCED:
            self.prepare(
                name, REDUCED[param.dtype], param.shape, options.op, *options.factors,
                reducer.members,
            )  # fmt: skip
            self.share = max(param.nbytes, MIN_SHARE)
            self.simple = self.device == HOST
            self.weigh(reducer.weighing.cell if reducer.weighing.weight is not None else None)

    def join(self, group: Group, position: int) -> None:
        """Reduce this gradient together with the others of `group`."""
        self.group, self.position, self.simple = group, position, False

    def leave(self) -> None:
        """Reduce this gradient alone again. REQUIRES: nothing is in flight."""
        self.group = None
        if self.address:
            self.share = max(self.shape.numel() * self.dtype.itemsize, MIN_SHARE)
            self.simple = self.device == HOST

    def unhook(self) -> None:
        """Remove the hooks, if there are any."""
        for hook in (self.hook, self.pre_hook):
            if hook is not None:
                hook.remove()
        self.hook = self.pre_hook = None

    # -- in the hook --------------------------------------------------------------------------

    def note_stream(self) -> None:
        """Record this thread's stream, which computes the gradient: another thread may send it."""
        if self.address and self.device != HOST:
            self.request.stream = self.stream()

    @uncompiled
    def before_gradient(
        self, param: weakref.ref[torch.Tensor], grad: torch.Tensor
    ) -> torch.Tensor | None:
        """Weigh what a pass is about to add, unless it is the only pass."""
        reducer, to = self.reducer, param()
        if reducer.passes == 1 or reducer.weighing.weight is None or to is None:
            return None
        if _is_captured():
            return None
        if reducer.thread != get_ident():
            reducer.note_task(self.name)
        return reducer.weighing.weigh(to, grad)

    @uncompiled
    def share_of(self, param: torch.Tensor) -> int:
        """Return the gradient's share of `bytes_left`; on a device, also record its stream.

        Code that computes with it before it is sent runs in this stream, now.
        """
        if self.device == HOST:
            return self.share
        self.note_stream()
        return self.share if param.grad is not None and self.is_plain(param.grad) else BATCH_BYTES

    @uncompiled
    def may_send(self) -> bool:
        """Note a gradient that is not READY, or the first one of a graph task.

        Returns whether its hook may still send it. A pass that is captured into a CUDA graph does
        not count: no hook runs when the graph is replayed, and `synchronize` sends all gradients.
        """
        reducer = self.reducer
        if self.device != HOST and torch.cuda.is_current_stream_capturing():
            return False
        if reducer.thread != get_ident():
            reducer.note_task(self.name)
        if self.state >= QUEUED:
            self._note_repeat()
            return False
        self.seen += 1
        return self.fires_once and reducer.is_last

    def _note_repeat(self) -> None:
        """Send it at the end of passes from now on: this pass has accumulated it twice."""
        if self.fires_once:
            self.reclassify()
        self.seen = 2
        if self.state == SENT:
            self.reducer.gradient_repeated(self)
            raise AssertionError(
                f"gradient of '{self.name}' was accumulated again in the same backward pass while "
                "it was being reduced: several reentrant checkpoints use this parameter, which "
                "did not happen in earlier passes. Call optimizer.synchronize() and start the "
                "step again, which handles this now. Or pass use_reentrant=False to the checkpoints"
            )

    def reclassify(self) -> None:
        """Send it at the end of passes, until a pass has counted its accumulations."""
        self.fires_once, self.seen = False, 0
        self.reducer.unclassified.append(self)

    def classify(self) -> bool:
        """At the end of a pass: return whether the hook may send the gradient from now on.

        Not if the script's own hooks come after it, which may read and change the gradient.
        """
        hook = self.hook
        hooks = None if hook is None else hook.hooks_dict_ref()
        is_last = hook is None or not hooks or next(reversed(hooks)) == hook.id
        self.fires_once = self.seen == 1 and is_last
        return self.fires_once

    def take(self) -> torch.Tensor | None:
        """Return the queued gradient."""
        param, self.param = self.param, None
        assert param is not None
        return param.grad

    def send_alone(
        self, grad: torch.Tensor | None, failures: list[Exception], begin_ns: int = 0
    ) -> None:
        """Like `send`, but append an error to `failures`; draw HOOK from `begin_ns`, if not 0."""
        try:
            self.send(grad)
            if begin_ns:
                timeline.trace_hook(self.name, begin_ns)
        except Exception as error:
            failures.append(self._in_hook(error))

    def failure(self, code: int) -> Exception:
        """Return the error of a request that the core has rejected."""
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
        if self.state == QUEUED:
            passes = self.reducer.passes
            place = f"gradient of '{self.name}', backward pass {passes} of {passes}"
            text += f" (in the hook: {place})"
            self.state = ASK  # it may be sent again
        elif f"'{self.name}'" not in text:
            text += f" (gradient of '{self.name}')"
        error.args = (text, *error.args[1:])
        return error

    def is_plain(self, grad: torch.Tensor) -> bool:
        """Whether it is sent unchanged: dense, contiguous, alone, and of the declared type."""
        return (
            self.address != 0
            and self.group is None
            and grad.layout is torch.strided
            and grad.dtype is self.dtype
            and grad.get_device() == self.torch_device  # otherwise the model was moved
            and grad.shape == self.shape  # as declared
            and grad.is_contiguous()
        )

    def send(self, grad: torch.Tensor | None) -> None:
        """Start the reduction of `grad`, in place if it is dense and not compressed."""
        assert grad is not None
        reducer = self.reducer
        if not self.is_plain(grad):
            self._send_general(grad)
            self.state = SENT
            return
        begin_ns = timeline.now_ns() if reducer.tracing else 0
        address = grad.data_ptr()
        if reducer.tracing:
            timeline.trace_view(self.name, begin_ns, grad.nbytes)
        started, code = start_many([self], [address], [grad], reducer.pending)
        if not started:
            fail(code)

    @torch.no_grad()
    def _send_general(self, grad: torch.Tensor) -> None:
        """Like `send`, for gradients that are sparse, strided, grouped or compressed."""
        options = self.reducer.options
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
            if self.device != HOST:  # copies for it are made in this stream
                dense = verbs.adapter.dense(dense)
            group.add(self.position, dense, self.stream(), options, self.reducer.weighing.current)
            reduced = partial(group.finish, self.position)
        else:
            self.handle = verbs.reduce_async(
                "allreduce", [dense], True, self.name, options.op, *options.factors, itemgetter(0),
                process_set=options.process_set, weight=self.reducer.weighing.current,
            )  # fmt: skip
            reduced = partial(synchronize, self.handle)

        def finish() -> torch.Tensor:
            result: torch.Tensor = compression.decompress(reduced(), context)
            return result.to_sparse(self.sparse_dims) if is_sparse else result

        self.finish_general = finish

    def _send_sparse(self, grad: torch.Tensor) -> None:
        options = self.reducer.options
        if self.group is not None:
            raise ValueError(
                f"gradient of '{self.name}' is sparse and in a group, or would be compressed; pass "
                "sparse_as_dense=True, or leave the parameter out of `groups` and `compression`"
            )
        before, after = options.factors
        compression = options.compression
        values, context = compression.compress(grad._values() * before)
        handle, combine = start_sparse_allreduce(
            torch.sparse_coo_tensor(
                grad._indices(), values, grad.shape, device=values.device, check_invariants=False
            ),
            self.name,
            options.op,
            options.process_set,
            self.reducer.weighing.current,
        )
        self.handle = handle

        def finish() -> torch.Tensor:
            result = combine(synchronize(handle))
            values = compression.decompress(result._values(), context) * after
            return torch.sparse_coo_tensor(
                result._indices(),
                values,
                result.shape,
                device=values.device,
                check_invariants=False,
            )

        self.finish_general = finish

    # -- at the end of a pass, or in synchronize ------------------------------------------------

    def ensure_gradient(self, param: torch.Tensor) -> None:
        """Create a zero gradient if this rank has none, and memory for an expanded one."""
        if param.grad is None:
            sparse = self.sparse_dims > 0
            param.grad = self._sparse_zero(param) if sparse else zero_gradient(param)
        elif param.grad.layout is torch.strided and 0 in param.grad.stride():
            param.grad = param.grad.clone()

    def _sparse_zero(self, param: torch.Tensor) -> torch.Tensor:
        # With as many sparse dimensions as the other ranks' gradients.
        dims = self.sparse_dims
        return torch.sparse_coo_tensor(
            torch.zeros(dims, 0, dtype=torch.int64, device=param.device),
            param.new_zeros(0, *param.shape[dims:]),
            param.shape,
            device=param.device,
            check_invariants=False,
        )

    def wait(self) -> torch.Tensor:
        """Return the reduced gradient. Then nothing is in flight: see `reset`."""
        if self.keep is not None:
            reduced: torch.Tensor = self.wait_in(self.stream())
        else:
            assert self.finish_general is not None
            reduced = self.finish_general()
            self.finish_general = lambda: reduced  # for another call after an interrupt
        return reduced

    def finish(self, param: torch.Tensor) -> None:
        """Wait for the reduced gradient, put it into `param.grad`, and reset.

        After an interrupt it is still in flight, so another call does not send it again.
        """
        try:
            reduced, grad = self.wait(), param.grad
            if reduced is not grad:
                if grad is not None and grad.layout is torch.strided is reduced.layout:
                    grad.copy_(reduced)
                else:
                    param.grad = reduced
        except Exception:
            self.reset()
            raise
        self.reset()

    def stream(self) -> int:
        """Return the stream in which this thread computes on the parameter's device."""
        return 0 if self.device == HOST else verbs.adapter.stream(self.device)

    @property
    def handle_in_flight(self) -> int:
        """The core's handle of the gradient that `send` was given."""
        return self.handle if self.group is None else self.group.handle

    def reset(self) -> None:
        """Prepare for the next step. REQUIRES: nothing is in flight."""
        self.state = READY if self.fires_once and self.reducer.passes == 1 else ASK
        self.handle = 0
        self.finish_general = None

    def abandon(self) -> None:
        """Forget what is in flight."""
        super().abandon()
        if self.group is not None:
            self.group.abandon()
        self.reset()


def hookable(param: torch.Tensor) -> bool:
    """Return whether the parameter has gradients, or will have them once it is unfrozen."""
    may_have = param.is_floating_point() or param.is_complex()
    return param.requires_grad or (may_have and not param.is_inference())


@contextlib.contextmanager
def unfrozen(param: torch.Tensor) -> Iterator[None]:
    """Let torch add a hook to a parameter that is frozen now."""
    needs_gradient = param.requires_grad
    param.requires_grad_(True)
    try:
        yield
    finally:
        param.requires_grad_(needs_gradient)


def zero_gradient(param: torch.Tensor) -> torch.Tensor:
    """Return zeros of the type of the parameter's gradients, which torch lets scripts set."""
    return torch.zeros_like(param, dtype=getattr(param, "grad_dtype", None))


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


def changed_in_flight(name: str) -> AssertionError:
    """The error for a gradient that was changed while in flight."""
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


def send_together(queued: list[Gradient], pending: list[int], failures: list[Exception]) -> None:
    """Like `PlainTensors.send_gradients`, also for gradients on a device."""
    plain: list[tuple[Gradient, torch.Tensor]] = []
    for gradient in queued:
        grad = gradient.take()
        if grad is None or not gradient.is_plain(grad):
            gradient.send_alone(grad, failures)
        else:
            plain.append((gradient, grad))
    while plain:
        gradients, grads = zip(*plain, strict=True)
        count, code = start_many(gradients, [grad.data_ptr() for grad in grads], grads, pending)
        if count < len(plain):
            failures.append(gradients[count].failure(code))
        del plain[: count + 1]


def process_set_changed(process_set: ProcessSet) -> ValueError:
    """The error for an optimizer that was made for an earlier set of the same id."""
    return ValueError(
        f"DistributedOptimizer: its process set was removed and registered again, now as "
        f"{process_set}; make the optimizer again, too"
    )


def unexpected_pass(name: str, passes: int, why: str) -> AssertionError:
    """The error for a backward pass that was not expected before a step."""
    return AssertionError(
        f"gradient of '{name}' was computed more than backward_passes_per_step ({passes}) times "
        f"before step(): the existing gradients {why}; raise backward_passes_per_step, or "
        "call optimizer.step() or optimizer.zero_grad() (of the optimizer, not of the model) "
        "first"
    )
