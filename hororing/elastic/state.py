"""What elastic training keeps over a change of members: it can be saved, restored and sent.

Note [Which values count]. `save` keeps values in this process. `restore` goes back to them, after a
failure, on all ranks that are left. Then `sync` gives every rank what rank 0 has, which is the rank
with the most commits. Ranks that die during `sync` do no harm: what was saved is replaced when all
of it has come.
"""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

import hororing.numpy as hvd
from hororing import arguments, job, membership
from hororing.elastic import saved
from hororing.elastic.steps import Steps
from hororing.errors import HostsUpdatedInterrupt

_REMOVED: Final = 1  # of `membership.updates`: some leave, and none comes


class DealAnew(Exception):
    """The training function is to begin again, with what is left of the samples. For `run`."""


class State:
    """What a training function needs to go on. A base class: see `ObjectState`.

    Parameters
    ----------
    bcast_object : a function that returns, on all ranks, the object that rank 0 calls it with.
    get_rank : a function that returns the rank of this process.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._announced: deque[tuple[int, int]] = deque()  # any thread may announce
        self._last_update = 0  # when that was, which all ranks have heard of
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = 0
        self._steps: Steps | None = None  # where every step is a transaction
        self._path: Path | None = None  # of `save_to`
        self._commits_per_file = 1

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call these after every change of members, before the state is sent.

        They adapt what depends on the number of ranks: a learning rate, say.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to the new members. Called by `run` when hororing is initialised again."""
        self._announced.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Note that hosts will change, for the next `check_host_updates` on rank 0.

        The job's launcher is heard without it.

        Parameters
        ----------
        timestamp : when that became known; a later one is larger.
        update_res : 1: hosts were removed, 2: added, 3: both.
        """
        self._announced.append((timestamp, update_res))

    def commit(self) -> None:
        """Save, and leave the training function if members come or go.

        All ranks call it after the same steps. Blocks until rank 0 has called it, too.

        Raises
        ------
        HostsUpdatedInterrupt : on all ranks, for `run`.

        Examples
        --------
        >>> state.epoch += 1
        >>> state.commit()
        """
        replayed = self._steps is not None and self._steps.mark(light=False)
        self.save()
        self._commits += 1
        if (
            self._path is not None
            and self._rank() == 0
            and self._commits % self._commits_per_file == 0
        ):
            saved.write(self._path, self._commits, (type(self).__name__, self._kept()))
        self._leave_if_due(replayed)

    def save_to(self, path: str | os.PathLike[str], every: int = 1) -> None:
        """Write commits to a file, too, and begin with the one that is there.

        For jobs that start all processes again, as torchrun does, or after the end of an elastic
        job. Call it before `run`, on all ranks. Rank 0 writes. If the file exists, ranks take its
        values now; when `run` begins, all get those of rank 0. A rank that joins a job that has
        made steps does not read it. The file is a pickle: name none that others can write.

        Parameters
        ----------
        path : of the file. All hosts must see it; one that does not has nothing to offer if rank 0
            dies at once. It is replaced as a whole. A commit returns when the file is on disk.
        every : so many commits per file.

        Raises
        ------
        ValueError : the file is no such state, or that of another script.
        TypeError : a value can be saved in memory only.
        """
        if every < 1:
            raise ValueError(f"save_to: every={every!r} is no number from 1")
        self._path, self._commits_per_file = Path(path), every
        worlds = membership.history()
        begun = bool(worlds and worlds[-1].step)
        found = None if begun else saved.read(self._path)
        if found is None:
            return
        commits, (kind, kept) = found
        try:
            check_names([type(self).__name__], [kind])
            self._take(kept)
        except (KeyError, ValueError, RuntimeError, AttributeError) as error:
            raise ValueError(f"save_to: {path} is of another script: {error}") from error
        self._commits = commits

    def _kept(self) -> Any:
        """Return what `save` has kept, which can be pickled."""
        raise TypeError(f"save_to: {type(self).__name__} can be saved in memory only")

    def _take(self, kept: Any) -> None:
        """Go to what `_kept` has returned in another process."""
        raise TypeError(f"save_to: {type(self).__name__} can be saved in memory only")

    def check_host_updates(self) -> None:
        """Leave the training function if members come or go, and go on with what is not saved.

        All ranks call it after the same steps. Blocks until rank 0 has called it, too, unless the
        ranks have told one another with the step before the last one. Does nothing in a job whose
        ranks stay the same.

        Raises
        ------
        HostsUpdatedInterrupt : on all ranks, for `run`.
        """
        replayed = False
        if self._steps is not None:
            replayed = self._steps.mark(light=True)
            self._mark()
        self._leave_if_due(replayed)

    @property
    def keeps_steps(self) -> bool:
        """Whether a failure costs the step in flight only, with `check_host_updates` after each."""
        return self._steps is not None

    @property
    def ranks_in_step(self) -> int:
        """How many ranks have taken the step that the script is about to keep account of.

        That is `size()`, but for a step that is replayed. Count samples of all ranks with it.
        """
        if self._steps is None:
            return job.size()
        self._steps.look()
        return self._steps.recorded_ranks or job.size()

    def _leave_if_due(self, replayed: bool) -> None:
        if job.is_initialized() and not membership.is_elastic():
            return
        if self._steps is not None and self._steps.heard:
            known = self._last_update
            latest, what = self._steps.agreed()
        else:
            latest, what = self._latest_update() if self._rank() == 0 else (0, 0)
            # What rank 0 knows counts, since the others may hear of it earlier or later.
            known, latest, what = self._bcast_object((self._last_update, latest, what))
        self._last_update = max(known, latest)
        if latest > known:
            raise HostsUpdatedInterrupt(what == _REMOVED)
        if replayed:
            raise DealAnew

    def _latest_update(self) -> tuple[int, int]:
        """When hosts or processes have changed last, and how since the last look. On rank 0."""
        latest, what = membership.updates()
        if latest <= self._last_update:
            latest, what = self._last_update, 0
        while self._announced:
            stamp, kind = self._announced.popleft()
            if stamp > self._last_update:
                latest, what = max(latest, stamp), what | kind
        return latest, what

    # -- for `run`; see hororing.elastic.steps ---------------------------------------------------

    def _begin(self) -> None:
        """Training is about to begin, or to go on."""

    def _end(self) -> None:
        """It is over."""

    def _mark(self) -> None:
        """Copy what is kept beside the parameters."""

    def _progress(self) -> tuple[int, int]:
        """Tell steps and marks, for `membership.set_progress`."""
        return self._commits, 0

    def _fall_back(self) -> None:
        """Do at once what a failure asks for."""
        self.restore()

    def _settle(self) -> None:
        """Do the rest, in the next generation."""

    def _synchronize(self, needed: bool) -> bool:
        """Give all ranks the state of rank 0, if one of them needs it; whether that was done.

        All ranks must decide alike: those that stay may need nothing, while one has just come.
        """
        commits = self._commits
        if job.is_initialized() and job.size() > 1:
            mine = np.array([needed, commits], np.int64)
            needed, commits = hvd.allreduce(mine, name="elastic.sync", op=arguments.Max).tolist()
        if needed:
            self.sync()
            self._commits = commits
        return bool(needed)

    # --------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Keep the values as they are now, in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the values that were saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank the values of rank 0, and save them. All ranks call it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt what depends on the rank and the number of ranks. Nothing, unless overridden."""


class ObjectState(State):
    """A state of plain objects, which become attributes. They must be picklable.

    >>> state = ObjectState(hvd.broadcast_object, hvd.rank, epoch=0, batch=0)
    >>> state.epoch += 1

    Parameters
    ----------
    bcast_object, get_rank : as for `State`.
    kwargs : the objects by name, as they are before training.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        for name, value in kwargs.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """AttributeError. (Without this, type checkers know of no attributes by arguments.)"""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def save(self) -> None:
        """Copy the objects."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Go back to copies of the objects as they were saved last."""
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)

    def _kept(self) -> Any:
        return self._saved_state

    def _take(self, kept: Any) -> None:
        check_names(self._saved_state, kept)
        self._saved_state = kept
        ObjectState.restore(self)

    def sync(self) -> None:
        """Give every rank the objects that rank 0 has saved last."""
        if not self._saved_state:
            return
        saved = self._bcast_object(self._saved_state)
        if self._rank() != 0:
            self._saved_state = saved
            ObjectState.restore(self)


def check_names(here: Iterable[str], there: Iterable[str]) -> None:
    """ValueError where a state that was saved has other values than the one here."""
    if set(here) != set(there):
        raise ValueError(f"it has {sorted(there)}, and the state here {sorted(here)}")


__all__ = ["DealAnew", "ObjectState", "State", "check_names"]
