"""A training step as a transaction: all ranks continue with its result, or none does.

    gradients are reduced -> parameters change -> ... -> mark -> ...

A rank applies a step when all its gradients are reduced, so survivors differ by one step at most,
and a rank that lacks it gets its state from another. Parameters therefore need no copy.

The script's other values (epoch, place in the data, learning rate) are small. They are copied at
each *mark*, the call by which the script ends a step. After a failure the script runs the steps
since the mark again, to update its own values, and `take` leaves the parameters alone: a step is
*replayed*.

In a step, ranks also start to share their updates about hosts and processes; all have them at the
end of the next one, and no rank waits. ADR 52 has the reasons.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

import hororing.numpy as hvd
from hororing._engine import state
from hororing._requests import arguments, handles
from hororing.errors import HororingInternalError

_BITS = 2  # for the kind of change, below its time
# Ranks share updates at this interval, in seconds, but at least once in this number of steps.
_SHARE_S, _MAX_STEPS = 0.1, 100


class Place(NamedTuple):
    """The progress of a state.

    Attributes
    ----------
    step : int
        Number of steps that have changed the parameters.
    marks : int
        Number of marks since the last step.
    since_mark : tuple of int
        The number of ranks in each step since the last mark.
    """

    step: int = 0
    marks: int = 0
    since_mark: tuple[int, ...] = ()


class Counter(Protocol):
    """Counts steps that Python does not see, in a compiled function."""

    @property
    def agrees(self) -> bool:
        """Whether parameters change only when the gradients of all ranks are reduced."""

    def begin(self, owed: int) -> None:
        """Count from 0, and skip the first `owed` steps, which are replayed."""

    def read(self) -> tuple[int, int, int]:
        """Return how many steps have been skipped, begun and taken."""


class Steps:
    """The steps of the optimizers of one elastic state.

    Parameters
    ----------
    latest_update : callable
        Returns the latest change of hosts and processes that this rank knows: its time, in
        microseconds, and its kind (as `membership.updates`).

    Attributes
    ----------
    place : Place
        The progress of the parameters.
    saved : Place
        The progress of the copy of all values.
    keeps_parameters : bool
        The last mark did not copy the parameters, which a failure must keep.
    inconsistent : bool
        Parameters have changed other than by a step, or are being received.
    updates_shared : int
        Number of steps since the last mark in which all ranks have shared updates, or had
        agreed not to.
    running : bool
        The script is training, rather than `run` preparing for it.
    counter : Counter or None
        Counts steps that do not go through `take`; call `read_counter` to include them.
    """

    counter: Counter | None = None

    def __init__(self, latest_update: Callable[[], tuple[int, int]]) -> None:
        self._latest_update = latest_update
        self.place = self.saved = Place()
        self.keeps_parameters = self.inconsistent = self.running = False
        self.updates_shared = 0
        self._agreed = 0
        self._sharing = 0  # handle of the request that shares updates; 0: none
        self._steps_without = 0  # number of steps until the next one
        self._shared_at, self._shared_step = -math.inf, 0  # when the last one was started
        self._to_replay: list[int] = []  # steps to be replayed
        self._replayed = 0  # number of ranks in the step that was replayed since the mark

    # -- in a step ------------------------------------------------------------------------------

    def take(self, apply: Callable[[], Any]) -> Any:
        """Take a step of all ranks by `apply`; return its result, None if it is replayed."""
        if self._to_replay:
            self._replayed = self._to_replay.pop(0)
            return None
        place = self.place
        self.place = Place(place.step + 1, 0, (*place.since_mark, state.size()))
        self._replayed = 0
        result = apply()
        # If a rank is lost, the next gradients fail; others may have ended after this step.
        with contextlib.suppress(HororingInternalError):
            self._share_update()
        return result

    def _share_update(self) -> None:
        if self._sharing:  # since the step before
            sharing, self._sharing = self._sharing, 0
            latest, steps = hvd.synchronize(sharing).tolist()
            self._agreed = max(self._agreed, latest)
            self._steps_without = -steps - 1
            self.updates_shared += 1
        elif self.keeps_parameters and self._steps_without:
            self._steps_without -= 1
            self.updates_shared += 1
        if self.keeps_parameters and not self._steps_without:
            latest, what = self._latest_update()
            mine = np.array([max(self._agreed, latest << _BITS | what), -self._steps_until_next()])
            self._sharing = hvd.allreduce_async(mine, name="elastic.updates", op=arguments.Max)

    def _steps_until_next(self) -> int:
        """The number of steps after which this rank would share updates again."""
        now, steps = time.monotonic(), self.place.step - self._shared_step
        per_step_s = (now - self._shared_at) / max(steps, 1)
        self._shared_at, self._shared_step = now, self.place.step
        return max(int(min(_SHARE_S / max(per_step_s, 1e-9), _MAX_STEPS)), 1)

    @property
    def steps_to_replay(self) -> int:
        """The number of steps that are still to be replayed."""
        return len(self._to_replay)

    def read_counter(self) -> None:
        """Include the steps that `counter` has counted."""
        if self.counter is None:
            return
        replayed, begun, taken = self.counter.read()
        for _ in range(replayed):
            self._replayed = self._to_replay.pop(0)
        if taken:
            since_mark = self.place.since_mark + (state.size(),) * taken
            self.place = Place(self.place.step + taken, 0, since_mark)
        self.inconsistent = self.inconsistent or begun != taken  # it failed halfway
        if replayed or begun:
            self.counter.begin(len(self._to_replay))

    @property
    def recorded_ranks(self) -> int:
        """How many ranks took the step that the script records now; 0: the present number."""
        return self._replayed or (self._to_replay[0] if self._to_replay else 0)

    # -- at a mark ------------------------------------------------------------------------------

    def mark(self, keeps_parameters: bool) -> bool:
        """Note that the script's other values match the parameters.

        Returns whether steps were replayed, so that samples must be redistributed.
        """
        self.read_counter()
        replayed = bool(self._replayed)
        self.place = Place(self.place.step, self.place.marks + 1)
        self.keeps_parameters = keeps_parameters and (self.counter is None or self.counter.agrees)
        self.inconsistent = False
        self._set_to_replay([])
        return replayed

    def _set_to_replay(self, steps: Iterable[int]) -> None:
        owed, self._to_replay, self._replayed = self._to_replay, list(steps), 0
        if self.counter is not None and (owed or self._to_replay):
            self.counter.begin(len(self._to_replay))

    def agreed(self) -> tuple[int, int]:
        """The latest update that any rank has shared since the last mark, as `latest_update`."""
        agreed, self._agreed, self.updates_shared = self._agreed, 0, 0
        return agreed >> _BITS, agreed & ((1 << _BITS) - 1)

    # -- after a failure ------------------------------------------------------------------------

    @property
    def can_keep_parameters(self) -> bool:
        """Whether the parameters can be kept after a failure."""
        return self.keeps_parameters and not self.inconsistent

    def note_saved(self) -> None:
        """Note that all values are copied. If the script does so, a step is over."""
        self.read_counter()
        self.saved = Place(self.place.step, self.place.marks) if self.running else self.place

    def begin(self, place: Place, keeps_parameters: bool) -> None:
        """Continue from a place; the steps since its mark must be replayed."""
        self.read_counter()  # and ignore it
        self.place, self.keeps_parameters, self.inconsistent = place, keeps_parameters, False
        self._set_to_replay(place.since_mark)
        self._agreed = self.updates_shared = self._steps_without = 0
        self._shared_at, self._shared_step = time.monotonic(), place.step
        self.end()

    def end(self) -> None:
        """Abandon the request that shares updates."""
        if self._sharing:
            handles.abandon(self._sharing, None)
        self._sharing = 0
