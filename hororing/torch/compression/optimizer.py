"""DistributedOptimizer with a compressor that has state."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from hororing import arguments, job
from hororing.reduction import Reduction
from hororing.torch.compression.bucket import Bucket, Driver
from hororing.torch.compression.memory import KEY, Memory
from hororing.torch.compression.method import Method
from hororing.torch.gradient_optimizer import Distributed
from hororing.torch.reducer import Entry, Reducer
from hororing.torch.submission import BATCH_BYTES

# Of gradients. Buckets are as large as that at least, but for the last ones of their types.
BUCKET_BYTES: Final = 4 << 20

_alive: weakref.WeakSet[CompressingReducer] = weakref.WeakSet()


def _begin_anew() -> None:
    for reducer in list(_alive):
        reducer.begin_anew()


job.at_init(_begin_anew)


class CompressingReducer(Reducer):
    """A reducer whose large gradients are compressed, in buckets.

    Each of the user's groups is a bucket of its own. The others are filled in the order in which
    gradients are expected, from the last parameter to the first.
    """

    def __init__(self, method: Method, *given: Any) -> None:
        self._method = method
        self.memory = Memory()
        self._driver = Driver()
        self._made = 0  # buckets, for their names
        self._asked: list[list[torch.Tensor]] = []  # the user's groups
        self._arranged: list[Entry] | None = None  # as `follow` has returned them
        super().__init__(*given)
        _alive.add(self)

    def form_groups(self, groups: Iterable[Sequence[torch.Tensor]]) -> None:
        """Form buckets, and groups of what is not compressed."""
        self._asked = [list(members) for members in groups]
        small = [[p for p in group if not self._method.compresses(p)] for group in self._asked]
        super().form_groups([members for members in small if members])
        for members in self._asked:
            self._form(members, float("inf"))
        self._arranged = None
        self.follow()

    def follow(self) -> list[Entry]:
        """Do as any reducer, and put parameters that are new into buckets."""
        entries = super().follow()
        if entries is not self._arranged and self._gradients:
            self._arranged = entries
            self._form([p for p, _ in reversed(entries) if p.requires_grad], BUCKET_BYTES)
        return entries

    def _form(self, params: Sequence[torch.Tensor], limit: float) -> None:
        """Form buckets of those that are compressed and in none, each full at `limit` bytes."""
        open_buckets: dict[Any, list[torch.Tensor]] = {}
        for param in params:
            if self._gradients[id(param)][1].group is None and self._method.compresses(param):
                key = param.dtype, param.device
                bucket = open_buckets.setdefault(key, [])
                bucket.append(param)
                if sum(each.nbytes for each in bucket) >= limit:
                    self._form_bucket(open_buckets.pop(key))
        for bucket in open_buckets.values():
            self._form_bucket(bucket)

    def _form_bucket(self, params: Sequence[torch.Tensor]) -> None:
        gradients = [self._gradients[id(param)][1] for param in params]
        named = [(gradient.name, param) for gradient, param in zip(gradients, params, strict=True)]
        name = f"{self._prefix}.compressed.{self._made}:{named[0][0]}..{named[-1][0]}"
        self._made += 1
        bucket = Bucket(name, named, self._method, self.memory, self._driver)
        for position, gradient in enumerate(gradients):
            gradient.join(bucket, position)
            gradient.weight = BATCH_BYTES  # it is not sent with others
        self._groups.append(bucket)

    def _wait_for(self, entries: list[Entry]) -> None:
        self._driver.finish()
        super()._wait_for(entries)

    def begin_anew(self) -> None:
        """Forget all errors, and form buckets as a rank does that is new: an engine starts."""
        if not self.release.alive:
            return
        self.memory.replace({})
        self._driver.begin_anew()
        for _, gradient in self._gradients.values():
            gradient.group = None
        self._made = 0
        self.form_groups(self._asked)


class Compressed(Distributed):
    """What optimizers with such a compressor add to their class."""

    @property
    def _memory(self) -> Memory | None:
        reducer = self._reducer
        return reducer.memory if isinstance(reducer, CompressingReducer) else None

    @property
    def weight(self) -> None:
        """None: gradients count the same on all ranks.

        Raises
        ------
        ValueError : when it is set.
        """
        return None

    @weight.setter
    def weight(self, weight: float | None) -> None:
        if weight is not None:
            raise ValueError(
                f"optimizer.weight = {weight} cannot be used with a compression that keeps errors "
                "from step to step: they would count for another weight; use Compression.none, "
                ".fp16 or .bf16"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with what the compressor keeps on this rank."""
        state = super().state_dict()
        if self._memory is not None and self._memory.contents:
            state["state"][KEY] = dict(self._memory.contents)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, with what the compressor has kept if it is there."""
        held = dict(state_dict["state"])
        kept = held.pop(KEY, {})
        super().load_state_dict({**state_dict, "state": held})
        if self._memory is not None:
            # Copies: errors change in place.
            self._memory.replace(copy.deepcopy(kept))

    def _before_state_is_read(self) -> None:
        if self._memory is not None:
            self.state[KEY] = self._memory.contents  # type: ignore[index]

    def _after_state_is_replaced(self) -> None:
        kept: Any = self.state.pop(KEY, {})  # type: ignore[call-overload]
        if self._memory is not None:
            self._memory.replace(kept)

    def _note_scale(self, scale: torch.Tensor) -> None:
        if self._memory is not None:
            self._memory.note_scale(scale)


def check_compressed(options: Reduction, groups: object) -> None:
    """Raise ValueError for options that do not go with a compressor that has state."""
    if options.op not in (arguments.Average, arguments.Sum):
        raise ValueError(
            f"DistributedOptimizer: op={arguments.op_name(options.op)} cannot be used with a "
            "compression that keeps errors, which is for Average and Sum; use Compression.none, "
            ".fp16 or .bf16"
        )
    if options.predivide != 1.0:
        raise ValueError(
            "DistributedOptimizer: gradient_predivide_factor cannot be used with a compression "
            "that keeps errors: it adds up in float32; leave it out"
        )
    if isinstance(groups, str):
        raise ValueError(
            f"DistributedOptimizer: groups={groups!r} cannot be used with a compression that "
            "keeps errors; pass a number of groups, or leave it out"
        )
