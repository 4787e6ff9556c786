"""A gradient's path: from the hook into the core and back into `param.grad`.

A `Gradient` per parameter holds everything that can be computed once, so that its hook, on any of
autograd's threads, has little to do. Its `State` (_requests/persistent.py) determines what the hook
does. READY: the hook queues the gradient, and the step sends its queue once that is large enough;
large gradients are sent at once. ASK: the hook does so only if `may_send` agrees; the others are
sent at the end of the pass. On a device the core records one event per batch and stream, after all
work before its hooks.

A gradient may be accumulated several times in one pass, once by each reentrant checkpoint that uses
the parameter. So its hook sends it only if an earlier pass had one accumulation; the others are
sent at the end of the pass.

Its persistent request takes a gradient that is plain. Any other travels by a `Route`.

Ownership: parameter -> hook -> gradient -> step -> reducer -> parameter, until the reducer removes
the hooks, when its optimizer is deleted.
"""

from __future__ import annotations

from threading import get_ident

import torch
from torch.utils.hooks import RemovableHandle

from hororing._adapters.optimizer_options import Reduction
from hororing._engine import timeline
from hororing._engine.core import fail
from hororing._requests.compression import NoneCompressor
from hororing._requests.handles import HOST
from hororing._requests.persistent import ASK, QUEUED, READY, SENT, PersistentAllreduce, start_many
from hororing.errors import DuplicateNameError
from hororing.torch._optimizer.routes import (
    Alone,
    Group,
    Member,
    Route,
    Sparse,
    sparse_zero,
    stream_of,
)
from hororing.torch._optimizer.step import BATCH_BYTES, MIN_SHARE, Step
from hororing.torch._tensor.adapter import DTYPES
from hororing.torch._tensor.uncompiled import uncompiled
from hororing.torch._tensor.verbs import verbs


class Gradient(PersistentAllreduce):
    """The gradient of one parameter. Its hook, `on_gradient`, is in csrc/python/gradients.cc."""

    __slots__ = (
        "dtype",
        "fires_once",
        "hooks",
        "name",
        "options",
        "route",
        "seen",
        "shape",
        "sparse_dims",
        "torch_device",
    )  # fmt: skip

    step: Step
    param: torch.Tensor | None  # while the gradient is queued

    def __init__(
        self, name: str, param: torch.Tensor, step: Step, options: Reduction, members: int
    ) -> None:
        super().__init__(verbs.adapter.device(param))
        self.name = name
        self.step = step
        self.options = options
        self.seen = 0  # number of accumulations; within one pass until it is classified
        self.fires_once = False  # a pass had only one accumulation, so its hook may send it
        self.share = BATCH_BYTES  # its share of the queue's bytes_left
        self.sparse_dims = 0  # of the latest gradient that was sparse
        self.hooks: list[RemovableHandle] = []  # `on_gradient`, and that of weights
        self.dtype, self.shape = param.dtype, param.shape
        self.torch_device = param.get_device()
        self.route: Route = Alone(name, options)  # if it is not plain
        if options.compression is NoneCompressor and param.dtype in DTYPES:
            self.prepare(
                name, DTYPES[param.dtype], param.shape, options.op, *options.factors, members
            )
            self.share = max(param.nbytes, MIN_SHARE)
            self.simple = self.device == HOST
            self.weigh(step.weights.cell if step.weights.weight is not None else None)
        step.unclassified.append(self)
        step.on_device |= self.device != HOST

    def join(self, group: Group, position: int) -> None:
        """Reduce this gradient together with the others of `group`."""
        self.route = Member(self.name, self.options, group, position, self.device)
        self.simple = False

    def leave(self) -> None:
        """Reduce this gradient alone again. REQUIRES: nothing is in flight."""
        self.route = Alone(self.name, self.options)
        if self.address:
            self.share = max(self.shape.numel() * self.dtype.itemsize, MIN_SHARE)
            self.simple = self.device == HOST

    def unhook(self) -> None:
        """Remove the hooks, if there are any."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    # -- in the hook --------------------------------------------------------------------------

    def note_stream(self) -> None:
        """Record this thread's stream, which computes the gradient: another thread may send it."""
        if self.address and self.device != HOST:
            self.request.stream = stream_of(self.device)

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
        step = self.step
        if self.device != HOST and torch.cuda.is_current_stream_capturing():
            return False
        if step.thread != get_ident():
            step.note_task(self.name)
        if self.state >= QUEUED:
            self._note_repeat()
            return False
        self.seen += 1
        return self.fires_once and step.is_last

    def _note_repeat(self) -> None:
        """Send it at the end of passes from now on: this pass has accumulated it twice."""
        if self.fires_once:
            self.reclassify()
        self.seen = 2
        if self.state == SENT:
            self.step.repeated(self.name)
            raise AssertionError(
                f"gradient of '{self.name}' was accumulated again in the same backward pass while "
                "it was being reduced: several reentrant checkpoints use this parameter, which "
                "did not happen in earlier passes. Call optimizer.synchronize() and start the "
                "step again, which handles this now. Or pass use_reentrant=False to the checkpoints"
            )

    def reclassify(self) -> None:
        """Send it at the end of passes, until a pass has counted its accumulations."""
        self.fires_once, self.seen = False, 0
        self.step.unclassified.append(self)

    def classify(self) -> bool:
        """At the end of a pass: return whether the hook may send the gradient from now on.

        Not if the script's own hooks come after it, which may read and change the gradient.
        """
        hook = self.hooks[0] if self.hooks else None
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
            passes = self.step.passes
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
            and not self.route.together
            and grad.layout is torch.strided
            and grad.dtype is self.dtype
            and grad.get_device() == self.torch_device  # otherwise the model was moved
            and grad.shape == self.shape  # as declared
            and grad.is_contiguous()
        )

    def send(self, grad: torch.Tensor | None) -> None:
        """Start the reduction of `grad`, in place if it is dense and not compressed."""
        assert grad is not None
        step = self.step
        if not self.is_plain(grad):
            self._send_on_route(grad)
            self.state = SENT
            return
        begin_ns = timeline.now_ns() if step.tracing else 0
        address = grad.data_ptr()
        if step.tracing:
            timeline.trace_view(self.name, begin_ns, grad.nbytes)
        started, code = start_many([self], [address], [grad], step.pending)
        if not started:
            fail(code)

    @torch.no_grad()
    def _send_on_route(self, grad: torch.Tensor) -> None:
        """Like `send`, for gradients that are not plain."""
        if self.step.look is not None:
            self.step.look(self.name, grad)
        is_sparse = grad.layout is torch.sparse_coo
        if is_sparse:
            self.sparse_dims = grad.sparse_dim()
        if not self.route.together:
            kind = Sparse if is_sparse and not self.options.sparse_as_dense else Alone
            self.route = kind(self.name, self.options)
        self.route.send(grad, self.step.weights.current)

    # -- at the end of a pass, or in synchronize ------------------------------------------------

    def ensure_gradient(self, param: torch.Tensor) -> None:
        """Create a zero gradient if this rank has none, and memory for an expanded one."""
        if param.grad is None:
            dims = self.sparse_dims
            param.grad = sparse_zero(param, dims) if dims else zero_gradient(param)
        elif param.grad.layout is torch.strided and 0 in param.grad.stride():
            param.grad = param.grad.clone()

    def wait(self) -> torch.Tensor:
        """Return the reduced gradient. Then nothing is in flight: see `reset`."""
        if self.keep is None:
            return self.route.wait()
        reduced: torch.Tensor = self.wait_in(stream_of(self.device))
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

    def reset(self) -> None:
        """Prepare for the next step. REQUIRES: nothing is in flight."""
        self.state = READY if self.fires_once and self.step.passes == 1 else ASK
        self.handle = 0
        self.route.reset()

    def abandon(self) -> None:
        """Forget what is in flight."""
        super().abandon()
        self.route.abandon()
        self.reset()


def zero_gradient(param: torch.Tensor) -> torch.Tensor:
    """Return zeros of the type of the parameter's gradients, which torch lets scripts set."""
    return torch.zeros_like(param, dtype=getattr(param, "grad_dtype", None))
