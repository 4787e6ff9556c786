"""Process sets: some of the ranks, which reduce, gather and wait among themselves.

All ranks of the job know all sets, members or not. Tensor names are scoped by set, and sets may
overlap: ranks may use them in any order. See docs/process_sets.md.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final

from hororing._engine import membership, state
from hororing._engine.logs import logger
from hororing._requests import control, handles
from hororing._requests.names import WORLD_SET


class ProcessSet:
    """Some ranks of the job.

    Attributes
    ----------
    ranks : list of int
        Their numbers in the job, ascending.
    process_set_id : int or None
        None until the set is registered, by `init(process_sets=...)` or `add_process_set`, and
        after it was removed.
    mpi_comm : Comm or None
        The communicator of mpi4py that it was made of, or None. Only its ranks are used, as
        MPI.COMM_WORLD numbers them.

    Examples
    --------
    >>> even = hvd.ProcessSet([0, 2])  # for init(process_sets=[even])
    >>> even.ranks, even.included(), even.process_set_id  # on rank 0, not registered
    ([0, 2], True, None)
    """

    mpi_comm: Any = None
    # The job in which it was registered: in another one the same ranks are other processes.
    generation = 0

    def __init__(self, ranks: Iterable[int] | Any) -> None:
        if callable(getattr(ranks, "Get_group", None)):
            self.mpi_comm, ranks = ranks, _ranks_of(ranks)
        try:
            self.ranks: list[int] = sorted(operator.index(rank) for rank in ranks)
        except TypeError:
            raise ValueError(f"ProcessSet({ranks!r}): must be a sequence of ranks") from None
        self.process_set_id: int | None = None

    def __repr__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        """Return itself: a copied model communicates in the same set."""
        return self

    def __reduce__(self) -> Any:
        """Pickle only the ranks: the process that unpickles registers them in its own job."""
        return ProcessSet, (self.ranks,)

    def size(self) -> int | None:
        """Return the number of ranks in the set; None while it is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's rank in the set; None while not registered.

        ValueError where this process is not a member.
        """
        if self.process_set_id is None:
            return None
        if not self.included():
            raise ValueError(f"rank {state.rank()} is not part of provided process set {self}")
        return self.ranks.index(state.rank())

    def included(self) -> bool:
        """Whether this process is a member."""
        return state.rank() in self.ranks


def _ranks_of(communicator: Any) -> list[int]:
    from mpi4py import MPI

    if communicator == MPI.COMM_NULL:
        raise ValueError("ProcessSet: the communicator is MPI.COMM_NULL: this rank is not in it")
    mine, world = communicator.Get_group(), MPI.COMM_WORLD.Get_group()
    return list(MPI.Group.Translate_ranks(mine, range(mine.Get_size()), world))


class _WorldSet(ProcessSet):
    """All ranks of the job."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = WORLD_SET

    def __reduce__(self) -> Any:
        return "global_process_set"


global_process_set: Final[ProcessSet] = _WorldSet()
_registered: dict[int, ProcessSet] = {WORLD_SET: global_process_set}
# Further objects for the same sets.
_adopted: list[ProcessSet] = []


def _know_the_world() -> None:
    global_process_set.ranks = list(range(state.size()))


def _forget_all() -> None:
    for process_set in (*_registered.values(), *_adopted):
        if process_set is not global_process_set:
            process_set.process_set_id = None
    _adopted.clear()
    _registered.clear()
    _registered[WORLD_SET] = global_process_set


state.at_init(_know_the_world)
state.at_shutdown(_forget_all)


def register(process_set: ProcessSet | Sequence[int], *, internal: bool = False) -> ProcessSet:
    """Like `add_process_set`, also if sets are not dynamic.

    `internal`: for a layer that needs a set of its own. The user may add the same ranks.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    state.topology()
    if process_set.process_set_id is not None:
        raise ValueError(f"attempted to add a duplicate process set: {process_set} is registered")
    generation = membership.generation()

    def added(number: int) -> None:
        process_set.generation = generation
        process_set.process_set_id = number
        _registered[number] = process_set

    control.add_process_set(process_set.ranks, added, internal=internal)
    return process_set


def find(ranks: Sequence[int]) -> ProcessSet | None:
    """Return the registered set of these ranks, which are ascending, if there is one."""
    return next((each for each in _registered.values() if each.ranks == list(ranks)), None)


class SetOfMembers:
    """An internal set that only its members request; see `of_members`."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.users = itertools.count(1)  # for names: it has as many users on all members
        self._lock = threading.Lock()
        self._handle = 0
        self._error: Exception | None = None
        self._set = global_process_set
        if len(ranks) < state.size():
            self._set = ProcessSet(ranks)
            self._set.generation = membership.generation()
            self._handle = control.start_adding_process_set(self._set.ranks)

    def ready(self) -> bool:
        """Whether `get` returns at once, or raises."""
        try:
            return self._set.process_set_id is not None or handles.poll(self._handle)
        except ValueError:  # another thread has just got it
            return True

    def get(self, timeout_s: float) -> ProcessSet | None:
        """Block until all members have requested it. None if `timeout_s` passes first."""
        if self._set.process_set_id is None:
            if not handles.wait_at_most(self._handle, timeout_s):
                return None
            with self._lock:
                if self._error is not None:
                    raise self._error
                if self._set.process_set_id is None:
                    try:
                        self._set.process_set_id = handles.wait(self._handle)
                    except Exception as error:  # all callers get it, not only the first
                        self._error = error
                        raise
        return self._set


_of_members: dict[tuple[int, ...], SetOfMembers] = {}
_of_members_lock = threading.Lock()
state.at_shutdown(_of_members.clear)


def of_members(ranks: Sequence[int]) -> SetOfMembers:
    """Request a set of these ranks, including this one. Does not block.

    Only its members call it, at any time. Calls with the same ranks share one set.
    """
    key = tuple(sorted(ranks))
    with _of_members_lock:
        if key not in _of_members:
            _of_members[key] = SetOfMembers(key)
        return _of_members[key]


def obtain(ranks: Sequence[int]) -> ProcessSet:
    """Return the registered set of these ranks, or else an internal one."""
    return find(ranks) or register(ranks, internal=True)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set while the job runs, and return it with its id.

    All ranks of the job call it, members or not, with the same ranks and in the same order.

    Raises
    ------
    ValueError : on every rank, for ranks that do not exist or occur twice, for a set that exists
        already, and if ranks pass different sets. On this rank, if `process_set` is not a sequence
        of ranks, and without ``HORORING_DYNAMIC_PROCESS_SETS=1`` or
        ``init(process_sets="dynamic")``.

    Examples
    --------
    >>> odd = hvd.add_process_set(range(1, hvd.size(), 2))
    >>> if odd.included():
    ...     total = hvd.allreduce(loss, name="loss", op=hvd.Sum, process_set=odd)
    >>> hvd.remove_process_set(odd)
    True
    """
    if not state.process_sets_are_dynamic():
        raise ValueError(
            "add_process_set: set HORORING_DYNAMIC_PROCESS_SETS=1 (HOROVOD_DYNAMIC_PROCESS_SETS "
            'is understood too) or call init(process_sets="dynamic") to add process sets after '
            "init; or list them in init(process_sets=[...])"
        )
    return register(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set. All ranks of the job call it, in the same order.

    Returns whether a set was removed: False for the global set and for one that is not registered.
    Requests in flight in the set fail. Raises ValueError as `add_process_set` does, and TypeError
    for anything that is not a ProcessSet.

    >>> odd = hvd.add_process_set(range(1, hvd.size(), 2))
    >>> hvd.remove_process_set(odd)
    True
    """
    check_type(process_set, "remove_process_set")
    if not state.process_sets_are_dynamic():
        raise ValueError(
            "remove_process_set: set HORORING_DYNAMIC_PROCESS_SETS=1 or call "
            'init(process_sets="dynamic") to remove process sets after init'
        )
    return unregister(process_set)


def unregister(process_set: ProcessSet) -> bool:
    """Like `remove_process_set`, also if sets are not dynamic."""
    process_set_id = process_set.process_set_id
    if process_set_id in (None, WORLD_SET):
        return False

    def removed() -> None:
        _registered.pop(process_set_id, None)
        for each in (process_set, *_adopted):
            if each.process_set_id == process_set_id:
                each.process_set_id = None

    return control.remove_process_set(process_set_id, removed)


def ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of every registered set by its id."""
    return {number: list(_registered[number].ranks) for number in sorted(_registered)}


def check_member(process_set: ProcessSet, verb: str) -> int:
    """Return the id under which `verb` can use the set on this rank.

    Raises
    ------
    TypeError : not a ProcessSet, or not registered.
    ValueError : this rank is not a member.
    """
    if process_set is global_process_set:
        return WORLD_SET
    check_type(process_set, verb)
    if process_set.process_set_id is None:
        remedy = "pass it to init(process_sets=[...]) or add_process_set first"
        if membership.is_elastic():
            remedy += f"; all its ranks are needed, and this job has {state.size()} now"
        raise TypeError(f"{verb}: {process_set} is not registered; {remedy}")
    if not process_set.included():
        raise ValueError(
            f"{verb}: rank {state.rank()} is not a member of the provided process set {process_set}"
        )
    return process_set.process_set_id


def check_type(process_set: object, verb: str) -> None:
    """TypeError unless it is a process set."""
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"{verb}: process_set must be a ProcessSet, not {type(process_set).__name__}; "
            "add_process_set returns one"
        )


def rank_and_size(process_set: ProcessSet) -> tuple[int, int]:
    """Return this process's rank in the set, and the size of the set."""
    if process_set is global_process_set:
        return state.rank(), state.size()
    return process_set.ranks.index(state.rank()), len(process_set.ranks)


def parse(given: Any) -> list[ProcessSet]:
    """Return the static sets of `init(process_sets=...)`."""
    if given is None or (isinstance(given, str) and given.lower() == "dynamic"):
        return []
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(
            f"init: process_sets={given!r} is neither a list of process sets or of lists of ranks, "
            'nor "dynamic"'
        )
    found = [each if isinstance(each, ProcessSet) else ProcessSet(each) for each in given]
    return _with_those_of_others(found) if any(each.mpi_comm for each in found) else found


def _with_those_of_others(mine: list[ProcessSet]) -> list[ProcessSet]:
    """Return the sets of all ranks: a communicator that was split is another one on each rank."""
    from mpi4py import MPI

    known = {tuple(each.ranks): each for each in mine}
    of_all = MPI.COMM_WORLD.allgather(list(known))
    # In turns, so that ranks that split alike get the numbers in the order of their own lists.
    rows = itertools.zip_longest(*of_all)
    names = dict.fromkeys(ranks for row in rows for ranks in row if ranks is not None)
    return [known[ranks] if ranks in known else ProcessSet(ranks) for ranks in names]


def register_static(sets: Sequence[ProcessSet]) -> None:
    """Register the sets of `init(process_sets=...)`: ids from 1 in the order of the list."""
    for number, process_set in enumerate(sets):
        if membership.is_elastic() and not _fits(process_set):
            continue
        try:
            register(process_set)
        except ValueError as error:
            why = str(error).removeprefix("add_process_set: ")  # the user did not call it
            raise ValueError(f"init: entry {number} of process_sets: {why}") from None


def _fits(process_set: ProcessSet) -> bool:
    """Whether a set fits the ranks of an elastic job, which may have changed.

    A set of all ranks is the global one; one that lacks ranks cannot be used.
    """
    ranks = process_set.ranks
    if ranks == global_process_set.ranks:
        process_set.process_set_id = WORLD_SET
        process_set.generation = membership.generation()
        _adopted.append(process_set)
        return False
    if ranks and ranks[-1] >= state.size():
        logger.warning("init: %s is not registered: there are %d ranks now", ranks, state.size())
        return False
    return True


def adopt_static(sets: Sequence[ProcessSet]) -> None:
    """Give the sets of a further `init(process_sets=...)` the ids that they have."""
    known = {tuple(ranks): number for number, ranks in ids_and_ranks().items()}
    for number, process_set in enumerate(sets):
        if tuple(process_set.ranks) not in known:
            raise ValueError(
                f"init: entry {number} of process_sets: {process_set} is new, but hororing is "
                "initialized already; use add_process_set"
            )
        process_set.process_set_id = known[tuple(process_set.ranks)]
        _adopted.append(process_set)


__all__ = [
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "remove_process_set",
]
