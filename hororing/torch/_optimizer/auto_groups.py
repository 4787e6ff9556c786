"""DistributedOptimizer(groups="auto"): finds groups by measuring the first steps.

After SKIPPED steps each rank notes, in the next MEASURED ones, when its hooks fire. Then all ranks
time messages of two sizes and compute when each gradient is ready on all of them. The first rank
plans buckets (hororing/torch/_optimizer/bucket_planning.py) and broadcasts them.

All ranks must do so after the same step, and ranks that have joined count fewer steps. Therefore,
until groups are found, each step ends with a vote, an allreduce of one number: 1 from a rank that
has measured enough, 0 from any other. Joined ranks contribute zeros. All voters get the same sum.
If it is the number of ranks, all of them have just voted, no rank has joined, and nothing else is
in flight.

Messages are timed then, not within the steps, where gradients share batches and a message that
waits for a late rank looks expensive. With nothing else in flight, the times differ only by noise,
which makes them longer, so the shortest of REPEATS is right.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from hororing._engine import membership
from hororing._engine import statistics as engine_statistics
from hororing._requests import arguments
from hororing.torch._optimizer.bucket_planning import fit_cost, propose
from hororing.torch._optimizer.gradient import Gradient
from hororing.torch._optimizer.grouping import Grouping
from hororing.torch._optimizer.step import BATCH_BYTES
from hororing.torch._tensor.uncompiled import leave_uncompiled
from hororing.torch._tensor.verbs import verbs
from hororing.torch.ops import synchronize

SKIPPED: Final = 2  # steps, in which memory is allocated and connections are made
MEASURED: Final = 5  # steps
SMALL_BYTES: Final = 4 << 10
LARGE_BYTES: Final = 1 << 20
REPEATS: Final = 5

clock = time.perf_counter


class Measured(Grouping):
    """Groups that are found by measuring the first steps."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._fired_s: dict[int, float] = {}  # when each hook fired last, by id(parameter)
        self._steps: deque[dict[int, float]] = deque(maxlen=MEASURED)  # times since the first hook
        self._left = SKIPPED + MEASURED
        # Of the vote in progress and the requests after it: results by name, each with its
        # duration, or a handle with its start time. After an interrupt the next call continues.
        self._answers: dict[str, tuple[Any, float]] = {}
        self._has_voted = False  # in this step
        self._timers: list[RemovableHandle] = []
        self._stop = weakref.finalize(self, _remove, self._timers)  # alive until groups are found
        self._stop.atexit = False

    def before_hook(self, param: torch.Tensor) -> None:
        """Add a hook that notes the time: the one to come may send gradients."""
        if self._stop.alive:
            leave_uncompiled(_note)
            register: Any = param.register_post_accumulate_grad_hook  # torch declares no types
            self._timers.append(register(partial(_note, self._fired_s, id(param))))

    def pass_ended(self) -> None:
        """Note when the gradients of a step's last pass were ready."""
        if self.step.ended == self.step.passes and self._stop.alive and self._fired_s:
            begin_s = min(self._fired_s.values())
            self._steps.append({key: at - begin_s for key, at in self._fired_s.items()})
            self._left = max(0, self._left - 1)
        self._fired_s.clear()

    @property
    def agrees(self) -> bool:
        """Whether the vote of this step is over."""
        return self._has_voted and not self._answers

    def expect_agreement(self) -> None:
        """Begin a vote, unless there was one in this step."""
        self._answers.update({} if self._has_voted else {"begun": (None, 0.0)})

    def agree(self) -> None:
        """Until groups are found, vote on whether to find them now."""
        if not self._answers:
            return
        try:
            self._vote()
        except Exception:
            self._answers.clear()
            raise
        self._has_voted = True
        self._answers.clear()

    def restart(self, *, reduced: bool) -> None:
        """Begin a step, after finishing an interrupted vote."""
        if self._answers and reduced:
            self.expect_agreement()
            self.agree()
        self._has_voted = not self._stop.alive

    def _vote(self) -> None:
        ballot = torch.tensor([float(self._left == 0)], dtype=torch.float64, device="cpu")
        votes, _ = self._once("vote", partial(self._allreduce, ballot, arguments.Sum, "vote"))
        if votes[0] == len(self.options.process_set.ranks):
            self._regroup()

    def _regroup(self) -> None:
        """Find groups and form them. All ranks call it at once."""
        entries = list(self.gradients.values())
        times_s = [self._ready_s(*entry) for entry in entries]
        times_s += [self._fastest_s(SMALL_BYTES), self._fastest_s(LARGE_BYTES)]
        mine = torch.tensor(times_s, dtype=torch.float64, device="cpu")
        latest, _ = self._once("times", partial(self._allreduce, mine, arguments.Max, "times"))
        plan, _ = self._once("plan", partial(self._plan, entries, latest))
        buckets: dict[int, list[int]] = {}
        for index in torch.argsort(latest[:-2], stable=True).tolist():
            if plan[index] >= 0:
                buckets.setdefault(int(plan[index]), []).append(index)
        for bucket in buckets.values():
            # This gradient completes the bucket: its hook sends it with all that wait.
            entries[bucket[-1]][1].share = BATCH_BYTES
        self.found = [[entries[i][0] for i in bucket] for bucket in buckets.values() if bucket[1:]]
        self.form(self.found)
        sizes = {"groups": len(self.found), "gradients": sum(map(len, self.found))}
        predicted = {"before_s": float(plan[-2]), "after_s": float(plan[-1])}
        engine_statistics.show("groups", self, self.prefix, {**sizes, **predicted})
        self._stop()

    def _ready_s(self, param: torch.Tensor, gradient: Gradient) -> float:
        """The time when the gradient is ready here; infinite if it cannot be in a group.

        On a device, a hook fires when the gradient is launched, not when it is computed.
        """
        times_s = [step[id(param)] for step in self._steps if id(param) in step]
        sparse = gradient.sparse_dims > 0 and not self.options.sparse_as_dense
        if len(times_s) < MEASURED or sparse or param.device.type != "cpu":
            return float("inf")
        return statistics.median(times_s)

    def _fastest_s(self, size: int) -> float:
        """Return how long the fastest of some messages of `size` bytes takes."""
        message = torch.zeros(size // 4, dtype=torch.float32, device="cpu")
        name = f"message.{size}"
        send = partial(self._allreduce, message, arguments.Sum, name)
        return min(self._once(f"{name}.{turn}", send)[1] for turn in range(REPEATS))

    def _plan(self, entries: list[tuple[torch.Tensor, Gradient]], latest: torch.Tensor) -> int:
        """Start the broadcast of each gradient's bucket number, and of the predicted times."""
        members = self.options.process_set
        plan = torch.zeros(len(latest), dtype=torch.float64, device="cpu")
        if members.rank() == 0:
            *ready_s, small_s, large_s = latest.tolist()
            cost = fit_cost((SMALL_BYTES, small_s), (LARGE_BYTES, large_s))
            sizes = [self._wire_bytes(param) for param, _ in entries]
            found = propose(np.array(ready_s), np.array(sizes), cost)
            plan[:-2] = torch.from_numpy(found.buckets)
            plan[-2], plan[-1] = found.before_s, found.after_s
        name = f"{self.prefix}.regroup"
        return verbs.broadcast_async_(plan, members.ranks[0], name=name, process_set=members)

    def _wire_bytes(self, param: torch.Tensor) -> int:
        dtype = getattr(self.options.compression, "dtype", None)  # Compression.fp16 has it
        if isinstance(dtype, torch.dtype) and param.is_floating_point():
            return param.numel() * dtype.itemsize
        return param.nbytes

    def _allreduce(self, tensor: torch.Tensor, op: int, what: str) -> int:
        members = self.options.process_set
        name = f"{self.prefix}.groups.{what}"
        return verbs.allreduce_async_(tensor, name=name, op=op, process_set=members)

    def _once(self, what: str, start: Callable[[], int]) -> tuple[torch.Tensor, float]:
        """Return the result of the request that `start` makes, and its duration.

        The request is made once, even if an interrupt causes several calls.
        """
        if what not in self._answers:
            begin_s = clock()
            self._answers[what] = (start(), begin_s)
        result, seconds = self._answers[what]
        if isinstance(result, int):
            self._answers[what] = result, seconds = synchronize(result), clock() - seconds
        return result, seconds


def _note(fired_s: dict[int, float], key: int, _: torch.Tensor) -> None:
    fired_s[key] = clock()


def _remove(timers: list[RemovableHandle]) -> None:
    for timer in timers:
        timer.remove()


def check_auto_groups(groups: str, op: int) -> None:
    """Raise ValueError for words other than "auto", and for settings that exclude it."""
    if groups != "auto":
        raise ValueError(
            f'DistributedOptimizer: groups={groups!r} must be "auto", a number of groups, or lists '
            "of parameters"
        )
    if membership.is_elastic():
        raise ValueError(
            'DistributedOptimizer: groups="auto" measures the first steps of all ranks together, '
            "but new ranks of an elastic job join later; pass a number of groups"
        )
    if op == arguments.Adasum:
        raise ValueError(
            'DistributedOptimizer: groups="auto" measures when gradients become ready in backward, '
            "but op=Adasum reduces all changes at once, in step(); pass a number of groups"
        )
