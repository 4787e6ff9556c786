"""A step of training as a transaction: the ranks that live apply it, all of them or none.

    gradients are reduced -> vote: all ranks hold them -> parameters change -> ... -> mark -> ...

A rank votes when it holds all reduced gradients and has nothing left to do but to apply them. When
a rank is lost, and another one knows that all have voted, then everybody holds the gradients: those
that have not applied them do so. If nobody knows, nobody has applied them, and the step is done
again. So parameters need no copy, and the steps before are never lost.

What the script keeps beside the parameters (epoch, place in the data, learning rate) is small. A
copy of it is taken at each *mark*, where the script says that a step is over. After a failure that
copy may be older than the parameters: by the steps since the mark. The script then runs them again,
so that it keeps account of them, and `take` leaves the parameters alone: a step is *replayed*.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import hororing.numpy as hvd
from hororing import arguments, job

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


class Steps:
    """The steps of the optimizers of one elastic state, all of which vote.

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
    votes : since the last mark.
    running : the script is training, and not `run` preparing for it.
    """

    def __init__(self, news: Callable[[], tuple[int, int]]) -> None:
        self._news = news
        self.place = self.saved = Place()
        self.light = self.torn = self.running = False
        self.votes = 0
        self._agreed = 0
        self._owed: list[int] = []  # steps to be replayed
        self._replayed = 0  # the number of ranks of the step that was, since the mark
        # This rank has voted for it, as one of so many.
        self._apply: Callable[[], Any] | None = None
        self._ranks = 0

    # -- in a step ------------------------------------------------------------------------------

    def take(self, apply: Callable[[], Any]) -> Any:
        """Let all ranks take a step, by `apply`; what it returns. None where it is replayed.

        Where a failure is not to go back further, it blocks until all ranks hold their gradients.
        HororingInternalError: this rank does not know whether they do; `settle` does, in the next
        generation.
        """
        if self._owed:
            self._replayed = self._owed.pop(0)
            return None
        self._apply, self._ranks = apply, job.size()
        if self.light:
            self._vote_now()
        return self._applied()

    def _vote_now(self) -> None:
        latest, what = self._news()
        told = np.array([max(self._agreed, latest << _BITS | what)])
        if job.size() > 1:
            # Blocking: this thread then does the work of the engine, which need not wake.
            told = hvd.allreduce(told, name="elastic.vote", op=arguments.Max)
        self._agreed = int(told[0])
        self.votes += 1

    def _applied(self) -> Any:
        apply, self._apply = self._apply, None
        assert apply is not None
        place = self.place
        self.place = Place(place.step + 1, 0, (*place.since_mark, self._ranks))
        self._replayed = 0
        return apply()

    @property
    def recorded_ranks(self) -> int:
        """How many ranks have shared the step that the script keeps account of; 0: those of now."""
        return self._replayed or (self._owed[0] if self._owed else 0)

    # -- at a mark ------------------------------------------------------------------------------

    def mark(self, light: bool) -> bool:
        """Note that what is kept beside the parameters is as far as they are.

        Returns whether steps were replayed, so that samples are to be dealt anew.
        """
        replayed = bool(self._replayed)
        self.place = Place(self.place.step, self.place.marks + 1)
        self.light, self.torn = light, False
        self._owed, self._replayed, self._apply = [], 0, None
        return replayed

    def agreed(self) -> tuple[int, int]:
        """What all ranks have told one another by their votes: as `news`, of all of them."""
        agreed, self._agreed, self.votes = self._agreed, 0, 0
        return agreed >> _BITS, agreed & ((1 << _BITS) - 1)

    # -- after a failure ------------------------------------------------------------------------

    @property
    def goes_back_lightly(self) -> bool:
        """Whether the parameters are good as they are."""
        return self.light and not self.torn

    def note_saved(self) -> None:
        """Note that all values are copied. Where the script does so, a step is over."""
        self.saved = Place(self.place.step, self.place.marks) if self.running else self.place

    def settle(self, step: int) -> None:
        """Apply what this rank has voted for, if others have: they have done `step` steps."""
        if self._apply is not None and step > self.place.step:
            self._applied()
        self._apply = None

    def begin(self, place: Place, light: bool) -> None:
        """Go on from a place; the steps since its mark are to be replayed."""
        self.place, self.light, self.torn = place, light, False
        self._owed, self._replayed, self._apply = list(place.since_mark), 0, None
        self._agreed = self.votes = 0


__all__ = ["Place", "Steps"]
