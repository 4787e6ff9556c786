"""A state whose steps are transactions; each framework defines what its steps change.

See hororing.elastic.steps, and Note [Which values count] in hororing.elastic.state.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from hororing._engine import membership, state
from hororing._job.rendezvous.generations import Member
from hororing.elastic.state import ObjectState
from hororing.elastic.steps import Steps


class SteppedState(ObjectState):
    """A state of plain objects and of values that steps change. A base class."""

    def save(self) -> None:
        """Copy everything. Sub-classes first copy their own values."""
        super().save()
        if self._steps is not None:
            self._steps.note_saved()

    def restore(self) -> None:
        """Restore the last saved values. Sub-classes first restore their own values."""
        super().restore()
        if self._steps is not None:
            self._steps.begin(self._steps.saved, keeps_parameters=False)

    # -- defined by each framework ---------------------------------------------------------------

    def _can_agree_on_steps(self) -> bool:
        """Whether only steps that all ranks take together change the values of `_digest`."""
        return False

    def _attach(self, steps: Steps | None) -> None:
        """Make optimizers take their steps through `steps`, or, with None, as without a state."""
        raise NotImplementedError

    def _go_back(self) -> None:
        """Restore the values that `_mark` has copied."""
        raise NotImplementedError

    def _digest(self) -> int:
        """Return a hash, below 2**62, of the bits that steps change."""
        raise NotImplementedError

    def _sync_marked(self) -> None:
        """Broadcast from rank 0 the values that `_mark` copies, except for objects."""
        raise NotImplementedError

    def _prepare_sync(self, members: Sequence[Member], lacks: Sequence[bool], alike: bool) -> None:
        """Choose who sends in `sync`: rank 0, unless all complete ranks are `alike`."""

    # -- for `run` -------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not (membership.is_elastic() and self._can_agree_on_steps()):
            self._steps = None
            return
        if self._steps is None:
            self._steps = Steps(self._latest_update)
        self._attach(self._steps)

    def _end(self) -> None:
        if self._steps is not None:
            self._attach(None)
            self._steps.end()

    def _mark(self) -> None:
        self._marked = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def _progress(self) -> tuple[int, int]:
        if self._steps is None:
            return super()._progress()
        self._steps.read_counter()
        self._steps.running = False
        return self._steps.place[:2]

    def _fall_back(self) -> None:
        if self._steps is not None:
            self._steps.read_counter()
        if self._steps is None or not self._steps.can_keep_parameters:
            super()._fall_back()

    def _steps_taken(self) -> int | None:
        if self._steps is None:
            return None
        self._steps.read_counter()
        return self._steps.place.step

    def _restore_mark(self) -> None:
        if self._steps is not None and self._steps.keeps_parameters:
            self._go_back()
            for name, value in copy.deepcopy(self._marked).items():
                setattr(self, name, value)

    def _synchronize(self, needed: bool) -> bool:
        steps = self._steps
        if steps is None:
            return super()._synchronize(needed)
        world = membership.history()[-1]
        if state.size() > 1:
            is_new = steps.place[:2] == (0, 0) or steps.place.step != world.step
            needed = state.rank() > 0 and is_new
            digest = 0 if needed else self._digest()
            rows = self._gathered(needed, digest, steps.place.marks)
            lacks = rows[:, 0].astype(bool)
            alike, marked = (len(set(rows[~lacks, column])) == 1 for column in (1, 2))
            steps.inconsistent = state.rank() != 0  # until everything has been received
            if lacks.any() or not alike:
                # Only rank 0 has the copy of its mark.
                self._prepare_sync(world.members, lacks.tolist(), alike and marked)
                self.sync()
            else:
                self._sync_marked()
                ObjectState.sync(self)
        mine = steps.place, steps.keeps_parameters, self._last_update, self._commits
        place, keeps_parameters, self._last_update, self._commits = self._bcast_object(mine)
        steps.begin(place, keeps_parameters)
        steps.saved, steps.running = place, True
        if keeps_parameters:
            self._mark()
        self._settled = True
        return True
