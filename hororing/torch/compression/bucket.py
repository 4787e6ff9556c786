"""Buckets: gradients that are compressed and reduced together, in a few collectives.

A bucket starts in the hook of its last gradient. It continues whenever another bucket starts and
its own collective is complete; a caller that waits completes all buckets in turn. Names match the
collectives, so ranks may use any order.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Generator, Sequence
from typing import Any, Final

import torch

from hororing._adapters.optimizer_options import Reduction
from hororing._requests.arguments import Average
from hororing._requests.process_sets import ProcessSet
from hororing.errors import MismatchError
from hororing.torch._optimizer.routes import Group
from hororing.torch._optimizer.weights import Weights
from hororing.torch._tensor.verbs import verbs
from hororing.torch.compression.hosts import Hosts
from hororing.torch.compression.memory import Memory
from hororing.torch.compression.method import Kept, Link, Method, Piece, parts_of
from hororing.torch.ops import poll, synchronize

_WEIGHTS: Final = -1  # the handle of a bucket that waits for the sum of weights


class Driver:
    """The buckets of one optimizer that are in flight."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights  # of the optimizer
        self._active: list[Bucket] = []
        self._hosts: Hosts | None = None
        self._lock = threading.RLock()  # hooks may run on several threads

    def start(self, bucket: Bucket) -> None:
        """Start a bucket, and continue those that can proceed at once."""
        with self._lock:
            for each in self._active[:]:
                while each.handle and self._is_complete(each.handle):
                    self._resume(each)
            self._active.append(bucket)
            self._resume(bucket)

    def send_weight(self) -> None:
        """Start the sum of the ranks' weights, unless it has been started."""
        with self._lock:
            self.weights.send_total(always=True)

    def finish(self) -> None:
        """Wait for all buckets. Does not raise errors of reductions: `Bucket.finish` does."""
        with self._lock:
            while self._active:
                for bucket in self._active[:]:
                    self._resume(bucket)

    def _is_complete(self, handle: int) -> bool:
        return self.weights.total_is_known if handle == _WEIGHTS else poll(handle)

    def wait(self, handle: int) -> Any:
        """Wait for a bucket's collective, or for the sum of weights; return the result."""
        return self.weights.wait_total() if handle == _WEIGHTS else synchronize(handle)

    def hosts(self, process_set: ProcessSet) -> Hosts:
        """Return the hosts of the set, the same object for all buckets."""
        if self._hosts is None:
            self._hosts = Hosts(process_set.ranks)
        return self._hosts

    def begin_anew(self) -> None:
        """Forget the hosts: a new engine starts."""
        self._hosts = None

    def forget(self, bucket: Bucket) -> None:
        """Do not continue `bucket`."""
        with self._lock:
            if bucket in self._active:
                self._active.remove(bucket)

    def _resume(self, bucket: Bucket) -> None:
        if not bucket.resume():
            self._active.remove(bucket)


class Bucket(Group):
    """Some gradients of one type, on one device. `Group` describes the interface."""

    def __init__(
        self, name: str, options: Reduction, params: Sequence[tuple[str, torch.Tensor]],
        method: Method, memory: Memory, driver: Driver,
    ) -> None:  # fmt: skip
        super().__init__(name, len(params), options)
        self._method, self._memory, self._driver = method, memory, driver
        self.names = [name for name, _ in params]
        unit = method.multiple
        self._lengths = [-(-param.numel() // unit) * unit for _, param in params]
        param = params[0][1]
        self._device = param.device
        self._dtype = torch.float64 if param.dtype is torch.float64 else torch.float32
        self.work_s = 0.0  # time spent in `resume`, without waits
        self.samples = False  # whether to compare the next sum with the exact one
        self.cosine = float("inf")  # of the two, in the last comparison
        self._agreed = False  # all ranks compress in this way
        self._steps: Generator[int, Any, None] | None = None
        self._given: Any = None  # what to send to the generator next
        self._failure: Exception | None = None
        self._stream: Any = None  # on which it computes, on a device
        # Memory for errors and gradients; `_flat` holds errors between steps.
        self._flat = self._spare = self._vector([])

    def add(self, *given: Any) -> None:
        """Add the gradient of one member. With the first one, the sum of weights starts."""
        if self._agreed:
            self._driver.send_weight()
        super().add(*given)

    def _submit(self, weight: float | None = None) -> None:
        order = sorted(self._waiting)
        tensors, streams = zip(*(self._waiting[position] for position in order), strict=True)
        self._waiting = {}
        self._results = dict(zip(order, tensors, strict=True))
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
            external: Any = torch.cuda.ExternalStream  # torch declares no types
            for stream in {*streams} - {self._stream.cuda_stream}:
                self._stream.wait_stream(external(stream, self._device))
        self._steps = self._reduce(order, tensors)
        self._driver.start(self)

    def resume(self) -> bool:
        """Wait for the collective in flight and start the next one; False: all are done."""
        steps = self._steps
        if steps is None:  # after an interrupt
            return False
        try:
            with self._computing(), torch.no_grad():
                proceed = steps.send
                if self.handle:
                    try:
                        # An interrupt here keeps the handle, for the next wait.
                        self._given, self.handle = self._driver.wait(self.handle), 0
                    except Exception as error:
                        proceed, self._given, self.handle = steps.throw, error, 0
                given, self._given = self._given, None
                begin_s = time.perf_counter()
                try:
                    self.handle = proceed(given)
                finally:
                    self.work_s += time.perf_counter() - begin_s
            return True
        except StopIteration:
            pass
        except Exception as error:
            self._failure, self.handle = error, 0
        except BaseException:
            if not self.handle:  # the interrupt has ended the generator
                self._steps, self._failure = None, _interrupted(self._name)
            raise
        self._steps = None
        return False

    def finish(self, position: int) -> torch.Tensor:
        """Wait for all buckets that are in flight; raise this one's error once."""
        self._driver.finish()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        result = self._results.pop(position)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            result.record_stream(current)
        return result

    def abandon(self) -> None:
        """Forget waiting gradients and collectives in flight."""
        self._driver.forget(self)
        if self.handle == _WEIGHTS:
            self.handle = 0
        super().abandon()
        self._steps, self._given, self._failure = None, None, None

    def _computing(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _vector(self, lengths: Sequence[int]) -> torch.Tensor:
        return torch.empty(sum(lengths), dtype=self._dtype, device=self._device)

    def _reduce(
        self, order: Sequence[int], given: Sequence[torch.Tensor]
    ) -> Generator[int, Any, None]:
        process_set = self._options.process_set
        if not self._agreed:
            yield from self._agree(order, given)
        weights = self._driver.weights
        self._driver.send_weight()
        if not weights.total_is_known:
            yield _WEIGHTS
        weights.wait_total()
        weight, ranks = weights.relative(), len(process_set.ranks)
        if weights.all_zero:
            self._results = {at: torch.zeros_like(each) for at, each in self._results.items()}
            return
        if ranks == 1:  # it has a weight; otherwise nothing is reduced
            return
        divisor = ranks if self._options.op == Average else 1
        reduce = self._reduce_by_hosts if self._method.scope == "hosts" else self._compress
        results = yield from reduce(order, given, process_set, divisor, weight)
        self._results = dict(zip(order, results, strict=True))

    def _agree(
        self, order: Sequence[int], given: Sequence[torch.Tensor]
    ) -> Generator[int, Any, None]:
        """Check that all ranks compress these gradients in the same way. MismatchError if not.

        The request has the name of the first gradient, so it also fails if another rank sends them
        one by one. That rank waits for all of them, so this rank then sends the others, too.
        """
        names, process_set = [self.names[position] for position in order], self._options.process_set
        mine = "\n".join(
            [str(self._method)]
            + [
                f"{name}, {gradient.dtype}, of shape {tuple(gradient.shape)}"
                for name, gradient in zip(names, given, strict=True)
            ]
        )
        text = torch.tensor([*mine.encode(), 0], dtype=torch.uint8, device="cpu")
        try:
            gathered = yield verbs.allgather_async(text, names[0], process_set)
            theirs = [
                each.split("\n") for each in bytes(gathered.tolist()).decode().split("\0")[:-1]
            ]
            lines = list(itertools.zip_longest(*theirs, fillvalue="no further gradient"))
            differing = [line for line in lines if len(set(line)) > 1]
            self._agreed = not differing
            if differing:
                ranks = "; ".join(map("rank {}: {}".format, process_set.ranks, differing[0]))
                why = f"compression differs: {ranks}"
        except MismatchError as error:
            why = f"compression differs, this rank has {self._method} for {names[0]}: {error}"
        if not self._agreed:
            for name, gradient in zip(names[1:], given[1:], strict=True):
                with contextlib.suppress(MismatchError):
                    yield verbs.allreduce_async_(
                        gradient, name=name, op=self._options.op, process_set=process_set
                    )
            raise MismatchError(f"{why}; pass all ranks the same compression and groups")

    def _reduce_by_hosts(
        self, order: Sequence[int], given: Sequence[torch.Tensor], process_set: ProcessSet,
        divisor: int, weight: float,
    ) -> Generator[int, Any, list[torch.Tensor]]:  # fmt: skip
        hosts = self._driver.hosts(process_set)
        lengths = [self._lengths[position] for position in order]
        total = self._vector(lengths).zero_()
        for part, gradient in zip(parts_of(total, lengths, given), given, strict=True):
            _fill(part, gradient, weight)
        inside, failure = hosts.inside(), None
        if inside is not None:
            total = yield Link(f"{self._name}.host", inside).sum(total, "sum")
        leaders = hosts.leaders()
        if leaders is not None:
            try:
                parts = parts_of(total, lengths, given)
                results = yield from self._compress(order, parts, leaders, divisor, 1.0)
                for part, result in zip(parts, results, strict=True):
                    part.copy_(result)
            except Exception as error:  # the ranks of this host wait for the result
                total.fill_(float("nan"))
                failure = error
        elif not hosts.several:
            total /= divisor
        if inside is not None and hosts.several:
            link = Link(f"{self._name}.host", inside)
            total = yield link.broadcast(total, hosts.leader, "result")
        if failure is not None:
            raise failure
        return parts_of(total, lengths, given)

    def _compress(
        self, order: Sequence[int], given: Sequence[torch.Tensor], process_set: ProcessSet,
        divisor: int, weight: float,
    ) -> Generator[int, Any, list[torch.Tensor]]:  # fmt: skip
        piece = self._piece(order, given, divisor, weight)
        link = Link(self._name, process_set)
        exact = piece.flat.clone() if self.samples else None
        results, kept, finite = yield from self._method.reduce(piece, link)
        if exact is not None:
            exact = yield link.sum(exact, "exact")
            self.samples, self.cosine = False, _cosine(piece.parts(exact), results)
        self._keep(piece, kept, finite)
        return results

    def _piece(
        self, order: Sequence[int], given: Sequence[torch.Tensor], divisor: int, weight: float
    ) -> Piece:
        """Return the sum of errors and of gradients times `weight`."""
        names = [self.names[position] for position in order]
        lengths = [self._lengths[position] for position in order]
        kept = [self._memory.contents.get(name, {}) for name in names]
        fits = len(self._spare) == sum(lengths)
        flat = self._spare if fits else self._vector(lengths)
        piece = Piece(flat, lengths, given, names, kept, divisor)
        factor = self._memory.change_of_scale(self._name)
        for whole, gradient, held in zip(torch.split(flat, lengths), given, kept, strict=True):
            part = whole[: gradient.numel()].view(gradient.shape)
            whole[gradient.numel() :] = 0
            error = held.get("error")
            if error is None or error.shape != part.shape:
                _fill(part, gradient, weight)
                continue
            held["error"] = error = error.to(part.device, part.dtype)
            if factor is not None:
                error.mul_(factor.to(error.device))
            if weight:
                torch.add(error, gradient, alpha=weight, out=part)
            else:  # the gradient may be infinite or NaN
                part.copy_(error)
        return piece

    def _keep(self, piece: Piece, kept: Sequence[Kept], finite: torch.Tensor) -> None:
        """Keep errors and factors for the next step; if the sum is not finite, change nothing.

        `GradScaler` skips such a step on all ranks, because they have the same sum.
        """
        if self._device.type == "cpu" and not finite:
            return
        for part, name, old, new in zip(
            piece.parts(piece.flat), piece.names, piece.kept, kept, strict=True
        ):
            new = {"error": part, **new}
            if self._device.type != "cpu":  # a check would have to wait for the device
                for what, tensor in new.items():
                    before = old.get(what, torch.zeros_like(tensor))
                    tensor.copy_(torch.where(finite, tensor, before))
            self._memory.contents[name] = new
        if len(piece.names) == self._count:
            self._flat, self._spare = piece.flat, self._flat


def _fill(part: torch.Tensor, gradient: torch.Tensor, weight: float) -> None:
    """Set `part` to gradient * weight; 0 times anything is 0."""
    if weight == 0:
        part.zero_()
    else:
        part.copy_(gradient).mul_(weight)


def _cosine(exact: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """Return 1 if both are zero, and -1 if one of them is not finite."""
    a, b = (torch.cat([part.reshape(-1) for part in parts]) for parts in (exact, other))
    scale = float(a.norm() * b.norm())
    cosine = float(a @ b) / scale if scale else float(torch.equal(a, b))
    return cosine if math.isfinite(cosine) else -1.0


def _interrupted(name: str) -> AssertionError:
    return AssertionError(
        f"the reduction of '{name}' was interrupted between its collectives, and other ranks wait "
        "for the remaining ones; end the job"
    )
