"""A step of training as a transaction: it is in the state that all ranks go on with, or is not.

    gradients are reduced -> parameters change -> ... -> mark -> ...

A rank applies a step when all its gradients are reduced, so the step is that of all ranks. When a
rank is lost meanwhile, some of the others may have applied the step, and some may not. The next
generation goes on from whoever has taken most steps: a rank that lacks one gets the state of
another. If nobody who lives has applied the step, it is done again. So parameters need no copy, and
the steps before are never lost.

What the script keeps beside the parameters (epoch, place in the data, learning rate) is small. A
copy of it is taken at each *mark*, where the script says that a step is over. After a failure that
copy may be older than the parameters: by the steps since the mark. The script then runs them again,
so that it keeps account of them, and `take` leaves the parameters alone: a step is *replayed*.

With each step ranks also start to tell one another what they know of hosts and processes that come
and go. They have heard it when the next step is over, all of them, and so leave at the same mark.
Nobody waits for it: what all ranks have started before their gradients is complete with these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

import hororing.numpy as hvd
from hororing import arguments, collectives, job
from hororing.errors import HororingInternalError

_BITS = 2  # of what has changed, below the time when


class Place(NamedTuple):
    """How far a state is.

    Attributes
    ----------
    step : steps that the parameters have seen.
    marks : marks since the last one.
    since_mark : the number of ranks of each step since the last mark.
    """

    step: int = 0
    marks: int = 0
    since_mark: tuple[int, ...] = ()


class Counter(Protocol):
    """Counts steps where Python does not see them: in a compiled function."""

    @property
    def agrees(self) -> bool:
        """Whether parameters change only when the gradients of all ranks are reduced."""

    def begin(self, owed: int) -> None:
        """Count from 0, and leave out the first `owed` steps, which are replayed."""

    def read(self) -> tuple[int, int, int]:
        """Return how many steps have been left out, begun, and taken."""


class Steps:
    """The steps of the optimizers of one elastic state.

    Parameters
    ----------
    news : returns what this rank knows of hosts and processes that come and go: when, in
        microseconds, and what (as `membership.updates`).

    Attributes
    ----------
    place : how far the parameters are.
    saved : how far the copy of all values is.
    light : the last mark has left out the parameters, so that a failure is not to go back further.
    torn : parameters have changed in another way than by a step, or are being received.
    heard : how often all ranks have told one another news since the last mark.
    running : the script is training, and not `run` preparing for it.
    counter : of steps that do not come by `take`; their place is known after `look`.
    """

    counter: Counter | None = None

    def __init__(self, news: Callable[[], tuple[int, int]]) -> None:
        self._news = news
        self.place = self.saved = Place()
        self.light = self.torn = self.running = False
        self.heard = 0
        self._agreed = 0
        self._telling = 0  # the handle of what ranks tell one another; 0: none
        self._owed: list[int] = []  # steps to be replayed
        self._replayed = 0  # the number of ranks of the step that was, since the mark

    # -- in a step ------------------------------------------------------------------------------

    def take(self, apply: Callable[[], Any]) -> Any:
        """Take a step of all ranks by `apply`; what it returns. None where it is replayed."""
        if self._owed:
            self._replayed = self._owed.pop(0)
            return None
        place = self.place
        self.place = Place(place.step + 1, 0, (*place.since_mark, job.size()))
        self._replayed = 0
        result = apply()
        # Whoever is lost, the next gradients tell of it; and others may have ended with this step.
        with contextlib.suppress(HororingInternalError):
            self._exchange_news()
        return result

    def _exchange_news(self) -> None:
        if self._telling:  # since the step before
            telling, self._telling = self._telling, 0
            self._agreed = max(self._agreed, int(hvd.synchronize(telling)[0]))
            self.heard += 1
        if self.light:
            latest, what = self._news()
            told = np.array([max(self._agreed, latest << _BITS | what)])
            self._telling = hvd.allreduce_async(told, name="elastic.news", op=arguments.Max)

    @property
    def owed(self) -> int:
        """How many steps are still to be replayed."""
        return len(self._owed)

    def look(self) -> None:
        """Learn of the steps that `counter` has counted."""
        if self.counter is None:
            return
        replayed, begun, taken = self.counter.read()
        for _ in range(replayed):
            self._replayed = self._owed.pop(0)
        if taken:
            since_mark = self.place.since_mark + (job.size(),) * taken
            self.place = Place(self.place.step + taken, 0, since_mark)
        self.torn = self.torn or begun != taken  # it failed while it changed parameters
        if replayed or begun:
            self.counter.begin(len(self._owed))

    @property
    def recorded_ranks(self) -> int:
        """How many ranks have shared the step that the script keeps account of; 0: those of now."""
        return self._replayed or (self._owed[0] if self._owed else 0)

    # -- at a mark ------------------------------------------------------------------------------

    def mark(self, light: bool) -> bool:
        """Note that what is kept beside the parameters is as far as they are.

        Returns whether steps were replayed, so that samples are to be dealt anew.
        """
        self.look()
        replayed = bool(self._replayed)
        self.place = Place(self.place.step, self.place.marks + 1)
        self.light = light and (self.counter is None or self.counter.agrees)
        self.torn = False
        self._owe([])
        return replayed

    def _owe(self, steps: Iterable[int]) -> None:
        owed, self._owed, self._replayed = self._owed, list(steps), 0
        if self.counter is not None and (owed or self._owed):
            self.counter.begin(len(self._owed))

    def agreed(self) -> tuple[int, int]:
        """What all ranks have heard since the last mark: as `news`, of all of them."""
        agreed, self._agreed, self.heard = self._agreed, 0, 0
        return agreed >> _BITS, agreed & ((1 << _BITS) - 1)

    # -- after a failure ------------------------------------------------------------------------

    @property
    def goes_back_lightly(self) -> bool:
        """Whether the parameters are good as they are."""
        return self.light and not self.torn

    def note_saved(self) -> None:
        """Note that all values are copied. Where the script does so, a step is over."""
        self.look()
        self.saved = Place(self.place.step, self.place.marks) if self.running else self.place

    def begin(self, place: Place, light: bool) -> None:
        """Go on from a place; the steps since its mark are to be replayed."""
        self.look()  # and forget it
        self.place, self.light, self.torn = place, light, False
        self._owe(place.since_mark)
        self._agreed = self.heard = 0
        self.end()

    def end(self) -> None:
        """Forget what ranks are telling one another."""
        if self._telling:
            collectives.abandon(self._telling, None)
        self._telling = 0


__all__ = ["Counter", "Place", "Steps"]
