"""DistributedOptimizer with a compressor with error feedback."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from hororing._adapters.optimizer_options import Reduction
from hororing._engine import state as engine_state
from hororing._requests import arguments
from hororing.torch._optimizer.distributed import Distributed
from hororing.torch._optimizer.reducer import Entry, Reducer
from hororing.torch._optimizer.submission import BATCH_BYTES
from hororing.torch.compression.bucket import Bucket, Driver
from hororing.torch.compression.memory import KEY, Memory
from hororing.torch.compression.method import Method, is_large

# Minimum size of buckets, in bytes of gradients, except for the last one of each type.
BUCKET_BYTES: Final = 4 << 20

_alive: weakref.WeakSet[CompressingReducer] = weakref.WeakSet()


def _begin_anew() -> None:
    for reducer in list(_alive):
        reducer.begin_anew()


engine_state.at_init(_begin_anew)


class CompressingReducer(Reducer):
    """A reducer whose large gradients are compressed, in buckets.

    Each of the user's groups is a separate bucket. The others are filled in the order in which
    gradients are expected, from the last parameter to the first.
    """

    def __init__(self, method: Method | None, *given: Any) -> None:
        self._method = method
        self.memory = Memory()
        self._driver = Driver()
        self.user_groups: list[list[torch.Tensor]] = []
        # Possible buckets, the same for all methods; a method may exclude some parameters.
        self.parts: list[list[torch.Tensor]] = []
        self.buckets: dict[int, Bucket] = {}  # by the number of the part
        self._arranged: list[Entry] | None = None  # as returned by `follow`
        super().__init__(*given)
        self._driver.weighing = self.weighing
        _alive.add(self)

    def choice(self, part: int) -> Method | None:
        """Return how a part is compressed; None: not at all."""
        return self._method

    def form_groups(self, groups: Iterable[Sequence[torch.Tensor]]) -> None:
        """Form the buckets and the groups of uncompressed gradients."""
        self.user_groups = [list(members) for members in groups]
        for _, gradient in self._gradients.values():
            gradient.leave()
        self.parts = [part for group in self.user_groups for part in _cut(group, float("inf"))]
        self.buckets = {}
        taken = {id(p) for at in range(len(self.parts)) for p in self._compressed(at)}
        small = [[param for param in group if id(param) not in taken] for group in self.user_groups]
        super().form_groups([members for members in small if members])
        for at in range(len(self.parts)):
            self._form_bucket(at)
        self._arranged = None
        self.follow()

    def follow(self) -> list[Entry]:
        """Like `Reducer.follow`; put new parameters into buckets."""
        entries = super().follow()
        if entries is not self._arranged and self._gradients:
            self._arranged = entries
            known = {id(param) for part in (*self.parts, *self.user_groups) for param in part}
            new = [p for p, _ in reversed(entries) if p.requires_grad and id(p) not in known]
            for part in _cut(new, BUCKET_BYTES):
                self.parts.append(part)
                self._form_bucket(len(self.parts) - 1)
        return entries

    def _compressed(self, part: int) -> list[torch.Tensor]:
        method = self.choice(part)
        return [p for p in self.parts[part] if method is not None and method.compresses(p)]

    def _form_bucket(self, part: int) -> None:
        method, params = self.choice(part), self._compressed(part)
        if method is None or not params:
            return
        gradients = [self._gradients[id(param)][1] for param in params]
        named = [(gradient.name, param) for gradient, param in zip(gradients, params, strict=True)]
        name = f"{self._prefix}.{method.name}.{part}:{named[0][0]}..{named[-1][0]}"
        bucket = Bucket(name, named, method, self.memory, self._driver)
        for position, gradient in enumerate(gradients):
            gradient.join(bucket, position)
            gradient.share = BATCH_BYTES  # so it is not sent with others
        self.buckets[part] = bucket
        self._groups.append(bucket)

    def _wait_for(self, entries: list[Entry]) -> None:
        self._driver.finish()
        super()._wait_for(entries)

    def begin_anew(self) -> None:
        """Forget all errors, and form buckets as on a new rank: a new engine starts."""
        if self.release.alive:
            self.memory.replace({})
            self._driver.begin_anew()
            self.form_groups(self.user_groups)


def _cut(params: Sequence[torch.Tensor], limit: float) -> list[list[torch.Tensor]]:
    """Return the large parameters in parts of one type and device, full at `limit` bytes."""
    parts: list[list[torch.Tensor]] = []
    unfilled: dict[Any, list[torch.Tensor]] = {}
    for param in params:
        if is_large(param):
            key = param.dtype, param.device
            part = unfilled.setdefault(key, [])
            part.append(param)
            if sum(each.nbytes for each in part) >= limit:
                parts.append(unfilled.pop(key))
    return parts + list(unfilled.values())


class Compressed(Distributed):
    """The mixin of distributed optimizers with such a compressor."""

    @property
    def _memory(self) -> Memory | None:
        reducer = self._reducer
        return reducer.memory if isinstance(reducer, CompressingReducer) else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the compressor's state on this rank."""
        state = super().state_dict()
        if self._memory is not None and self._memory.contents:
            state["state"][KEY] = dict(self._memory.contents)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, with the compressor's state if there is one."""
        held = dict(state_dict["state"])
        kept = held.pop(KEY, {})
        super().load_state_dict({**state_dict, "state": held})
        if self._memory is not None:
            # Copies: errors change in place.
            self._memory.replace(copy.deepcopy(kept))

    def _before_state_is_read(self) -> None:
        if self._memory is not None and self._memory.contents:
            self.state[KEY] = self._memory.contents  # type: ignore[index]

    def _after_state_is_replaced(self) -> None:
        kept: Any = self.state.pop(KEY, {})  # type: ignore[call-overload]
        if self._memory is not None:
            self._memory.replace(kept)

    def _note_scale(self, scale: torch.Tensor) -> None:
        if self._memory is not None:
            self._memory.note_scale(scale)


def check_compressed(options: Reduction, groups: object) -> None:
    """Raise ValueError for options that error feedback does not support."""
    if options.op not in (arguments.Average, arguments.Sum):
        raise ValueError(
            f"DistributedOptimizer: op={arguments.op_name(options.op)} cannot be used with a "
            "compression with error feedback, which is for Average and Sum; use Compression.none, "
            ".fp16 or .bf16"
        )
    if options.predivide != 1.0:
        raise ValueError(
            "DistributedOptimizer: gradient_predivide_factor cannot be used with a compression "
            "with error feedback, which sums in float32; leave it out"
        )
    if isinstance(groups, str):
        raise ValueError(
            f"DistributedOptimizer: groups={groups!r} cannot be used with a compression with "
            "error feedback; pass a number of groups, or leave it out"
        )
