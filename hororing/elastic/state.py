"""The state that elastic training keeps over a change of members: saved, restored and sent.

Note [Which values count]. `save` copies values in this process. After a failure, `restore` goes
back to them on all remaining ranks. Then `sync` sends the values of rank 0, the rank with the most
commits, to all. Ranks that die during `sync` are harmless: saved values are replaced only when
everything has been received.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

import hororing.numpy as hvd
from hororing._engine import membership, state
from hororing.elastic import alike, saved
from hororing.elastic.steps import Steps
from hororing.errors import HostsUpdatedInterrupt

# After a failure, a commit writes the file again at the earliest after this time, in s.
_AGAIN_S: Final = 10.0
_REMOVED: Final = 1  # of `membership.updates`: some leave, and none join


class RedistributeSamples(Exception):
    """The training function must begin again with the remaining samples. For `run`."""


class State:
    """The values that a training function needs to continue. A base class: see `ObjectState`.

    Parameters
    ----------
    bcast_object : callable
        A function that returns, on all ranks, the object that rank 0 calls it with.
    get_rank : callable
        A function that returns the rank of this process.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._announced: deque[tuple[int, int]] = deque()  # any thread may announce
        self._last_update = 0  # the time of the last change that all ranks know
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = 0
        self._steps: Steps | None = None  # if every step is a transaction
        self._path: Path | None = None  # of `save_to`
        self._commits_per_file = 1
        self._write_failed_at = -math.inf
        self._settled = False  # this process has had the job's state

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call these after every change of members, before the state is sent.

        They adapt values that depend on the number of ranks, such as a learning rate.
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

        Changes by the job's launcher are noted without it.

        Parameters
        ----------
        timestamp : int
            When that became known; later changes have larger values.
        update_res : int
            1: hosts were removed, 2: added, 3: both.
        """
        self._announced.append((timestamp, update_res))

    def commit(self) -> None:
        """Save, and leave the training function if members join or leave.

        All ranks call it after the same steps. Blocks until rank 0 has called it, too.

        Raises
        ------
        HostsUpdatedInterrupt : on all ranks, for `run`.

        Examples
        --------
        >>> state.epoch += 1
        >>> state.commit()
        """
        replayed = self._steps is not None and self._steps.mark(keeps_parameters=False)
        self.save()
        self._commits += 1
        if self._path is not None and self._rank() == 0:
            self._write(self._path)
        self._leave_if_due(replayed)

    def _write(self, path: Path) -> None:
        """Write this commit, if it is due. A full disk does not end the training."""
        failed_s = time.monotonic() - self._write_failed_at
        due = self._commits % self._commits_per_file == 0 or self._write_failed_at > -math.inf
        if not due or failed_s < _AGAIN_S:
            return
        try:
            saved.write(path, self._commits, (type(self).__name__, self._kept()))
            self._write_failed_at = -math.inf
        except OSError as error:
            self._write_failed_at = time.monotonic()
            logging.getLogger("hororing").error(
                "save_to: commit %d is not in %s (%s); a later commit tries again",
                self._commits, path, error,
            )  # fmt: skip

    def save_to(self, path: str | os.PathLike[str], every: int = 1) -> None:
        """Also write commits to a file, and begin with the one in it.

        For jobs that restart all processes, as torchrun does, or after the end of an elastic job.
        Call it before `run`, on all ranks. Rank 0 writes. If the file exists, ranks take its values
        now; when `run` begins, all get those of rank 0. A rank that joins a job that has already
        trained does not read it. The file is a pickle: use a path that others cannot write.

        Parameters
        ----------
        path : str or PathLike
            Of the file. All hosts must see it; a host without it cannot provide the state if
            rank 0 dies at once. It is replaced as a whole. A commit returns when it is on disk,
            or when the log has the error of the write; after 10 s a commit tries again.
        every : int, optional
            Number of commits per write.

        Raises
        ------
        ValueError : the file is not such a state, or is from another script.
        TypeError : a value can only be saved in memory.
        """
        if every < 1:
            raise ValueError(f"save_to: every={every!r} is not a whole number from 1")
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
            raise ValueError(f"save_to: {path} is from another script: {error}") from error
        self._commits = commits

    def _kept(self) -> Any:
        """Return what `save` has copied, in a form that can be pickled."""
        raise TypeError(f"save_to: {type(self).__name__} can be saved in memory only")

    def _take(self, kept: Any) -> None:
        """Restore what `_kept` has returned in another process."""
        raise TypeError(f"save_to: {type(self).__name__} can be saved in memory only")

    def check_host_updates(self) -> None:
        """Leave the training function if members join or leave; keep values that are not saved.

        All ranks call it after the same steps. Blocks until rank 0 has called it, too, unless the
        ranks have shared updates in the step before the last one. Does nothing in a job whose ranks
        do not change.

        Raises
        ------
        HostsUpdatedInterrupt : on all ranks, for `run`.
        """
        replayed = False
        if self._steps is not None:
            replayed = self._steps.mark(keeps_parameters=True)
            self._mark()
        self._leave_if_due(replayed)

    @property
    def keeps_steps(self) -> bool:
        """Whether a failure costs only the step in flight, if each step checks for updates."""
        return self._steps is not None

    @property
    def ranks_in_step(self) -> int:
        """How many ranks took the step that the script is about to record.

        That is `size()`, except for a replayed step. Use it to count the samples of all ranks.
        """
        if self._steps is None:
            return state.size()
        self._steps.read_counter()
        return self._steps.recorded_ranks or state.size()

    def _leave_if_due(self, replayed: bool) -> None:
        if state.is_initialized() and not membership.is_elastic():
            return
        if self._steps is not None and self._steps.updates_shared:
            known = self._last_update
            latest, what = self._steps.agreed()
        else:
            latest, what = self._latest_update() if self._rank() == 0 else (0, 0)
            # The updates of rank 0 count, because the others may receive them earlier or later.
            known, latest, what = self._bcast_object((self._last_update, latest, what))
        self._last_update = max(known, latest)
        if latest > known:
            raise HostsUpdatedInterrupt(what == _REMOVED)
        if replayed:
            raise RedistributeSamples

    def _latest_update(self) -> tuple[int, int]:
        """The time of the last change of hosts or processes, and its kind since the last check."""
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
        """Training is about to begin or continue."""

    def _end(self) -> None:
        """Training is over."""

    def _mark(self) -> None:
        """Copy the script's other values, without the parameters."""

    def _progress(self) -> tuple[int, int]:
        """Return steps and marks, for `membership.set_progress`."""
        return self._commits, 0

    def _fall_back(self) -> None:
        """The first part of recovery after a failure, before the next generation."""
        self.restore()

    def _steps_taken(self) -> int | None:
        """The number of steps in the state; None: it does not count them."""
        return None

    def _restore_mark(self) -> None:
        """The second part, in the next generation."""

    def _synchronize(self, needed: bool) -> bool:
        """Give all ranks the state of rank 0, if one of them needs it. Return whether it was done.

        The ranks decide together: those that stay may need nothing, while another has just joined.
        """
        commits = self._commits
        if state.is_initialized() and state.size() > 1:
            rows = self._gathered(int(needed), commits)
            needed, commits = bool(rows[:, 0].any()), int(rows[:, 1].max())
        if needed:
            self.sync()
            self._commits = commits
        self._settled = True
        return needed

    def _gathered(self, *mine: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return a row with up to three numbers of each rank, if their states have the same parts.

        MismatchError, MisfitsFound : as `alike.check`.
        """
        parts = self._parts()
        row = [*[*mine, 0, 0, 0][:3], alike.digest_of(parts), self._settled]
        rows = hvd.allgather(np.array([row], np.int64), name="elastic.sync")
        alike.check(parts, rows[:, 3].tolist(), rows[:, 4].astype(bool).tolist())
        return rows[:, :3]

    def _parts(self) -> dict[str, str]:
        """Return the form of each part that must be the same on all ranks, by name."""
        return {"state": f"{type(self).__name__}, steps kept: {self._steps is not None}"}

    # --------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save the present values in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the values that were saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank the values of rank 0, and save them. All ranks call it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt values that depend on the rank and the number of ranks. Does nothing by default."""


class ObjectState(State):
    """A state of plain objects, which become attributes. They must be picklable.

    >>> state = ObjectState(hvd.broadcast_object, hvd.rank, epoch=0, batch=0)
    >>> state.epoch += 1

    Parameters
    ----------
    bcast_object, get_rank : callable
        As for `State`.
    kwargs : dict
        The objects by name, with their initial values.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = copy.deepcopy(kwargs)  # scripts change lists and dicts in place
        for name, value in kwargs.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """AttributeError. (Without this, type checkers know of no attributes by arguments.)"""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def save(self) -> None:
        """Copy the objects."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Restore copies of the objects that were saved last."""
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
    """ValueError if a saved state has other values than this one."""
    if set(here) != set(there):
        raise ValueError(f"it has {sorted(there)}, and the state here {sorted(here)}")
