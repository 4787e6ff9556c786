"""How one gradient travels that its persistent request does not take as it is.

A `Route` sends one gradient in each step and waits for it. `Alone`: in a request of its own, made
anew, because the gradient is strided, cast, or on another device than it was. `Sparse`: as rows of
all ranks. `Member`: with others, in one request (`Group`) or compressed with them (a bucket is a
group, too).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from operator import itemgetter
from typing import Any, ClassVar

import torch

from hororing._adapters.optimizer_options import Reduction
from hororing._requests import handles
from hororing._requests.handles import HOST
from hororing.torch._tensor.verbs import verbs
from hororing.torch.ops import start_sparse_allreduce, synchronize


def stream_of(device: int) -> int:
    """Return the stream in which this thread computes on a device."""
    return 0 if device == HOST else verbs.adapter.stream(device)


class Group:
    """`count` gradients that are reduced together, as soon as the last of them is ready."""

    def __init__(self, name: str, count: int, options: Reduction) -> None:
        self._name = name
        self._count = count
        self._options = options
        self._waiting: dict[int, tuple[torch.Tensor, int]] = {}  # by position, with its stream
        self.handle = 0
        self._results: dict[int, torch.Tensor] = {}
        # Autograd may run hooks on several threads.
        self._lock = threading.Lock()

    def add(
        self, position: int, tensor: torch.Tensor, stream: int, weight: float | None = None
    ) -> None:
        """Add the gradient of one member; on a device it is dense, and `stream` computes it.

        Sends all of them if it is the last.
        """
        with self._lock:
            self._waiting[position] = tensor, stream
            if len(self._waiting) == self._count:
                self._submit(weight)

    def flush(self, weight: float | None = None) -> None:
        """Send the gradients that are ready: the other members are frozen."""
        with self._lock:
            if self._waiting:
                self._submit(weight)

    def _submit(self, weight: float | None = None) -> None:
        order = sorted(self._waiting)  # arrival may differ between ranks
        tensors, streams = zip(*(self._waiting[position] for position in order), strict=True)
        self._waiting = {}
        self._results = dict(zip(order, tensors, strict=True))
        self.handle = verbs.reduce_async(
            "grouped_allreduce", tensors, True, self._name, self._options.op,
            *self._options.factors, process_set=self._options.process_set, streams=streams,
            weight=weight,
        )  # fmt: skip

    def finish(self, position: int) -> torch.Tensor:
        """Wait for the group if that was not done yet; its error is raised once."""
        if self.handle:
            try:
                synchronize(self.handle)
            except Exception:
                self.handle = 0
                raise
            self.handle = 0
        return self._results.pop(position)

    def abandon(self) -> None:
        """Forget everything waiting and in flight."""
        if self.handle:
            handles.abandon(self.handle, None)
        self.handle = 0
        self._waiting, self._results = {}, {}


class Route(ABC):
    """The way of the gradient of `name`."""

    together: ClassVar[bool] = False  # it waits for other gradients

    def __init__(self, name: str, options: Reduction) -> None:
        self._name, self._options = name, options
        self._handle = 0  # of the request in flight
        self._result: torch.Tensor | None = None

    @abstractmethod
    def send(self, grad: torch.Tensor, weight: float | None) -> None:
        """Start the reduction of `grad`, in place where that is possible."""

    @abstractmethod
    def _finish(self) -> torch.Tensor:
        """Return the reduced gradient."""

    def wait(self) -> torch.Tensor:
        """Return the reduced gradient, also in another call after an interrupt."""
        if self._result is None:
            self._result = self._finish()
        return self._result

    @property
    def handle(self) -> int:
        """The handle of the request in flight, or 0."""
        return self._handle

    def reset(self) -> None:
        """Prepare for the next step. REQUIRES: nothing is in flight."""
        self._handle = 0
        self._result = None

    def abandon(self) -> None:
        """Forget what is in flight."""
        if self._handle:
            handles.abandon(self._handle, None)
        self.reset()


class _Dense(Route):
    """Packs a gradient with the compression of the options, and a sparse one as a dense one."""

    _context: Any = None  # of the compression
    _sparse_dims: int | None = None  # None: it was dense

    def _pack(self, grad: torch.Tensor) -> torch.Tensor:
        is_sparse = grad.layout is torch.sparse_coo
        self._sparse_dims = grad.sparse_dim() if is_sparse else None
        dense = grad.to_dense() if is_sparse else grad
        packed: torch.Tensor
        packed, self._context = self._options.compression.compress(dense)
        return packed

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._options.compression.decompress(packed, self._context)
        return result if self._sparse_dims is None else result.to_sparse(self._sparse_dims)


class Alone(_Dense):
    """A request of its own."""

    def send(self, grad: torch.Tensor, weight: float | None) -> None:
        """Start an allreduce."""
        options = self._options
        self._handle = verbs.reduce_async(
            "allreduce", [self._pack(grad)], True, self._name, options.op, *options.factors,
            itemgetter(0), process_set=options.process_set, weight=weight,
        )  # fmt: skip

    def _finish(self) -> torch.Tensor:
        return self._unpack(synchronize(self._handle))


class Member(_Dense):
    """One of the gradients of `group`."""

    together = True

    def __init__(
        self, name: str, options: Reduction, group: Group, position: int, device: int
    ) -> None:
        super().__init__(name, options)
        self._group, self._position, self._device = group, position, device

    def send(self, grad: torch.Tensor, weight: float | None) -> None:
        """Add it to the group. ValueError for a sparse one that is not sent as a dense one."""
        if grad.layout is torch.sparse_coo and not self._options.sparse_as_dense:
            raise ValueError(
                f"gradient of '{self._name}' is sparse and in a group, or would be compressed; "
                "pass sparse_as_dense=True, or leave the parameter out of `groups` and "
                "`compression`"
            )
        packed = self._pack(grad)
        if self._device != HOST:  # copies for it are made in this stream
            packed = verbs.adapter.dense(packed)
        self._group.add(self._position, packed, stream_of(self._device), weight)

    def _finish(self) -> torch.Tensor:
        return self._unpack(self._group.finish(self._position))

    @property
    def handle(self) -> int:
        """The handle of the group; 0 until it is complete."""
        return self._group.handle

    def abandon(self) -> None:
        """Abandon the group."""
        self._group.abandon()
        self.reset()


class Sparse(Route):
    """Rows of all ranks; their sum for the same place is one row."""

    _combine: Callable[[Any], torch.Tensor]

    def send(self, grad: torch.Tensor, weight: float | None) -> None:
        """Start to gather the rows."""
        options = self._options
        before, _ = options.factors
        values, self._context = options.compression.compress(grad._values() * before)
        rows = _sparse(grad._indices(), values, grad.shape)
        self._handle, self._combine = start_sparse_allreduce(
            rows, self._name, options.op, options.process_set, weight
        )

    def _finish(self) -> torch.Tensor:
        result, (_, after) = self._combine(synchronize(self._handle)), self._options.factors
        values = self._options.compression.decompress(result._values(), self._context) * after
        return _sparse(result._indices(), values, result.shape)


def _sparse(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        indices, values, shape, device=values.device, check_invariants=False
    )


def sparse_zero(param: torch.Tensor, dims: int) -> torch.Tensor:
    """Return a gradient without rows, with as many sparse dimensions as those of other ranks."""
    indices = torch.zeros(dims, 0, dtype=torch.int64, device=param.device)
    return _sparse(indices, param.new_zeros(0, *param.shape[dims:]), param.shape)
