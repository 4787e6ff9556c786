"""Gradients that are compressed with error feedback: a `Grouping` of buckets."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch

from hororing._adapters.optimizer_options import Reduction
from hororing._engine import state as engine_state
from hororing._requests import arguments
from hororing.torch._optimizer.grouping import Entry, Grouping
from hororing.torch._optimizer.step import BATCH_BYTES, Step
from hororing.torch.compression.bucket import Bucket, Driver
from hororing.torch.compression.memory import KEY, Memory
from hororing.torch.compression.method import Method, is_large

# Minimum size of buckets, in bytes of gradients, except for the last one of each type.
BUCKET_BYTES: Final = 4 << 20

_alive: weakref.WeakSet[Compressed] = weakref.WeakSet()


def _begin_anew() -> None:
    for grouping in list(_alive):
        grouping.begin_anew()


engine_state.at_init(_begin_anew)


class Compressed(Grouping):
    """Large gradients in buckets, which `method` compresses.

    Each of the user's groups is a separate bucket. The others are filled in the order in which
    gradients are expected, from the last parameter to the first.
    """

    state_key = KEY

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.memory = Memory()
        # Possible buckets, the same for all methods; a method may exclude some parameters.
        self.parts: list[list[torch.Tensor]] = []
        self.buckets: dict[int, Bucket] = {}  # by the number of the part
        self._entries: list[Entry] = []

    def begin(self, step: Step, gradients: dict[int, Entry]) -> None:
        """Prepare for buckets."""
        super().begin(step, gradients)
        self._driver = Driver(step.weights)
        _alive.add(self)

    def release(self) -> None:
        """Form no more buckets."""
        _alive.discard(self)

    def choice(self, part: int) -> Method | None:
        """Return how a part is compressed, or None if it is not."""
        assert isinstance(self.method, Method)
        return self.method

    def form(self, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        """Form the buckets and the groups of uncompressed gradients."""
        for _, gradient in self.gradients.values():
            gradient.leave()
        self.parts = [part for group in groups for part in _cut(group, float("inf"))]
        self.buckets = {}
        taken = {id(p) for at in range(len(self.parts)) for p in self._compressed(at)}
        small = [[param for param in group if id(param) not in taken] for group in groups]
        super().form([members for members in small if members])
        for at in range(len(self.parts)):
            self._form_bucket(at)
        self.follow(self._entries)

    def follow(self, entries: list[Entry]) -> None:
        """Put new parameters into buckets."""
        self._entries = entries
        known = {id(param) for part in (*self.parts, *self.wanted) for param in part}
        new = [p for p, _ in reversed(entries) if p.requires_grad and id(p) not in known]
        for part in _cut(new, BUCKET_BYTES):
            self.parts.append(part)
            self._form_bucket(len(self.parts) - 1)

    def _compressed(self, part: int) -> list[torch.Tensor]:
        method = self.choice(part)
        return [p for p in self.parts[part] if method is not None and method.compresses(p)]

    def _form_bucket(self, part: int) -> None:
        method, params = self.choice(part), self._compressed(part)
        if method is None or not params:
            return
        gradients = [self.gradients[id(param)][1] for param in params]
        named = [(gradient.name, param) for gradient, param in zip(gradients, params, strict=True)]
        name = f"{self.prefix}.{method.name}.{part}:{named[0][0]}..{named[-1][0]}"
        bucket = Bucket(name, self.options, named, method, self.memory, self._driver)
        self.join(bucket, gradients)
        for gradient in gradients:
            gradient.share = BATCH_BYTES  # so it is not sent with others
        self.buckets[part] = bucket

    def before_wait(self) -> None:
        """Complete the buckets."""
        self._driver.finish()

    def begin_anew(self) -> None:
        """Forget all errors, and form buckets as on a new rank: a new engine starts."""
        for group in self.groups:
            group.abandon()
        self.memory.replace({})
        self._driver.begin_anew()
        self.form(self.wanted)

    # -- state ------------------------------------------------------------------------------------

    def kept(self) -> Any:
        """Return errors and factors, by the names of parameters."""
        return self.memory.contents

    def adopt(self, kept: Any) -> None:
        """Replace errors and factors."""
        self.memory.replace(kept)

    def note_scale(self, scale: torch.Tensor) -> None:
        """Note the scale of the errors."""
        self.memory.note_scale(scale)


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
