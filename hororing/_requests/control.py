"""Requests without tensors: barriers, join, and adding and removing process sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from hororing._engine.core import lib
from hororing._engine.state import begin_era
from hororing._requests.handles import submit, take_numbers, wait, wait_and_go_on
from hororing._requests.names import OPTIMIZER, WORLD_SET, forget_counts

_BARRIER: Final = int(lib.HR_BARRIER)
_JOIN: Final = int(lib.HR_JOIN)
_ADD_PROCESS_SET: Final = int(lib.HR_ADD_PROCESS_SET)
_REMOVE_PROCESS_SET: Final = int(lib.HR_REMOVE_PROCESS_SET)
_OF_MEMBERS_ALONE: Final = 2  # as the root of _ADD_PROCESS_SET


def barrier(process_set: int = WORLD_SET) -> None:
    """Block until every rank of the set has called `barrier`."""
    wait(_start(_BARRIER, "barrier.noname", process_set=process_set))


def join() -> int:
    """Block until every rank has called `join`; return the last one to do so."""
    handle = _start(_JOIN, "join.noname")
    # Ranks have made different numbers of unnamed calls. All of them are complete when it returns,
    # but optimizers still have the names that they got. No call is possible until then, and Ctrl-C
    # may end this one.
    forget_counts(lambda verb, _: verb != OPTIMIZER)
    begin_era()
    return int(wait(handle))


def add_process_set(
    ranks: Sequence[int], then: Callable[[int], None], *, internal: bool = False
) -> None:
    """Add a set, and call `then` with its id. All ranks call it. Internal ones may be duplicates.

    After Ctrl-C, another thread calls `then`.
    """

    def go_on(added: int) -> None:
        # The id may be that of an earlier set, in which other ranks have called.
        forget_counts(lambda _, process_set: process_set == added)
        then(added)

    name = "add_process_set.noname"
    handle = _start(_ADD_PROCESS_SET, name, integers=ranks, root=int(internal))
    wait_and_go_on(handle, go_on)


def start_adding_process_set(ranks: Sequence[int]) -> int:
    """Start to add an internal set that only its members report; `wait` returns its id.

    Only once at a time for the same ranks, in ascending order.
    """
    name = f"add_process_set.{'.'.join(map(str, ranks))}"
    return _start(_ADD_PROCESS_SET, name, False, integers=ranks, root=_OF_MEMBERS_ALONE)


def start_barrier(name: str, process_set: int, *, blocking: bool) -> int:
    """Start a barrier with its own name."""
    return _start(_BARRIER, name, blocking, process_set=process_set)


def check_engine() -> None:
    """Raise the error of a request made now, if the engine has ended or failed."""
    if lib.hr_state_now() != lib.HR_STATE_RUNNING:
        wait(_start(_BARRIER, "barrier.check"))


def remove_process_set(process_set: int, then: Callable[[], None]) -> bool:
    """Return whether the set existed, and call `then` before. All ranks call it.

    After Ctrl-C, another thread calls `then`.
    """

    def go_on(existed: int) -> bool:
        then()
        return bool(existed)

    handle = _start(_REMOVE_PROCESS_SET, "remove_process_set.noname", root=process_set)
    return wait_and_go_on(handle, go_on)


def _start(collective: int, name: str, blocking: bool = True, **arguments: Any) -> int:
    """Start a request without tensors. Its result is a number, 0 for a barrier.

    With a fixed name, requests match in the order of the calls, whatever else ranks count.
    """
    finish = partial(_number, collective != _BARRIER)
    return submit(collective, name, (), keep=None, finish=finish, blocking=blocking, **arguments)


def _number(has_one: bool, handle: int) -> int:
    return take_numbers(handle, 0)[0] if has_one else 0
