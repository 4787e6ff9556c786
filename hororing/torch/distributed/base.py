"""The common base of a process group: its ranks, names and checks.

A group is a process set. Its calls are numbered, and the number is the request's name. Calls
therefore match in order, and a call that differs between ranks is a MismatchError on all of them. A
call that fails on one rank before it reaches the engine also takes its number. That rank sends a
barrier instead, so that the others fail, too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import secrets
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as torch_distributed

from hororing._requests import control, handles, process_sets
from hororing._requests.process_sets import ProcessSet
from hororing.errors import MismatchError, StalledError
from hororing.torch._tensor.uncompiled import uncompiled
from hororing.torch._tensor.verbs import adapter, verbs
from hororing.torch.distributed import callbacks
from hororing.torch.distributed.board import Board
from hororing.torch.distributed.forms import long_form
from hororing.torch.distributed.work import Work

# torch's stubs have other signatures, and lack many names.
dist: Any = torch_distributed
_Base: Any = dist.ProcessGroup

Tensors = list[torch.Tensor]
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def request(function: F) -> F:
    """Give a method its request's name, and report a failure to the other ranks."""
    verb = function.__name__.lstrip("_")

    @uncompiled  # DDP calls it from compiled functions
    def call(self: Group, *args: Any, **kwargs: Any) -> Work:
        name = self.next_name(verb)
        try:
            args = long_form(verb, args, kwargs)
            work: Work = function(self, name, *args, **kwargs)
        except Exception:  # of whatever type: torch, too, refuses tensors
            self.refuse(name)
            raise
        return work

    return cast(F, functools.wraps(function)(call))


def single(tensors: Any, verb: str) -> Any:
    """Return the one tensor of `tensors`. ValueError if there are others."""
    if len(tensors) != 1:
        raise ValueError(f"{verb}: a process has one tensor here, not {len(tensors)}")
    return tensors[0]


def fill(verb: str, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    """Copy the part that each rank of the group has sent."""
    for rank, (output, part) in enumerate(zip(outputs, parts, strict=True)):
        if output.numel() != part.numel():
            raise MismatchError(
                f"{verb}: rank {rank} of the group has sent {part.numel()} elements, but the "
                f"output for them has {output.numel()} (shape {list(output.shape)})"
            )
        adapter.copy(output, part.reshape(output.shape))


def _first(pair: tuple[int, Any]) -> int:
    return pair[0]


def same_shape(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all have one shape."""
    return all(tensor.shape == tensors[0].shape for tensor in tensors)


# The minimum timeout of the broadcast that agrees on a group's keys in the store.
_SIGN_S = 10.0


class Group(_Base):  # type: ignore[misc]
    """Ranks that make calls together. Parameters: those of `ProcessGroup`."""

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        timeout: timedelta,
        store: Any,
        at_shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(rank, len(ranks))
        self._place, self._ranks = rank, list(ranks)
        # The engine orders the ranks of a set ascending. For each of them: its rank in the group.
        self._order = sorted(range(len(ranks)), key=self._ranks.__getitem__)
        self._is_ascending = self._order == list(range(len(ranks)))
        self._torch_name = self._description = "undefined"
        self._timeout_s = timeout.total_seconds()
        self._at_shutdown: Callable[[], None] | None = at_shutdown
        self._numbers = itertools.count(1)
        members = process_sets.of_members(self._ranks)
        # torch's own name may differ between members.
        self._name = f"group{next(members.users)}"
        found = members.get(self._timeout_s)
        if found is None:
            raise StalledError(
                f"process group of ranks {self._ranks}: some of them have not made it within "
                f"{self._timeout_s:g} s"
            )
        self._set: ProcessSet = found
        # Prefix of its keys in the store, where earlier groups may have left some.
        sign = torch.tensor(secrets.randbits(48), device="cpu")
        handle = verbs.start_broadcast(
            sign, self._ranks[0], f"{self._name}.sign", self._set, in_place=True
        )
        # If it expired, all later calls that need the keys would fail.
        timeout_s = max(self._timeout_s, _SIGN_S)
        signed = Work(f"{self._name}.sign", handle, [sign], timeout_s)
        self._board = Board(
            store, lambda: f"hororing/{sign.item():x}/" if signed.wait() else "", rank
        )

    # -- description

    def getBackendName(self) -> str:
        """Return "hororing"."""
        return "hororing"

    _get_backend_name = name = getBackendName

    def __repr__(self) -> str:
        return f"<hororing {self._name} of ranks {self._ranks}: rank {self._place} of it>"

    def getGroupName(self) -> str:
        """Return torch's name of the group."""
        return self._torch_name

    def setGroupName(self, name: str) -> None:
        """Note torch's name of the group."""
        self._torch_name = name

    def getGroupDesc(self) -> str:
        """Return torch's description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Note torch's description of the group."""
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        cuda = [torch.device("cuda")] if torch.cuda.is_available() else []
        return [torch.device("cpu"), *cuda]

    def _get_backend(self, _: torch.device) -> Group:
        return self

    # Queried by torch for the backend of a device.
    supports_splitting = supports_coalescing = supports_shrinking = supports_time_estimate = False

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long later calls wait."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """End the group. Requests in flight continue; later calls are a ValueError."""
        ended, self._at_shutdown = self._at_shutdown, None
        if ended is not None:
            ended()

    abort = shutdown

    # -- the order of ranks

    def _in_set_order(self, parts: Iterable[T]) -> list[T]:
        """Reorder parts from the group's order to the engine's."""
        listed = list(parts)
        return [listed[rank] for rank in self._order]

    def _in_group_order(self, parts: Iterable[T]) -> list[T]:
        """Reorder parts from the engine's order to the group's."""
        return [part for _, part in sorted(zip(self._order, parts, strict=True), key=_first)]

    # -- names and waits

    def next_name(self, verb: str) -> str:
        """Return the name of the next call. ValueError after `shutdown`."""
        self._check_alive(verb)
        callback = callbacks.current(self)
        return callback.next_call() if callback else f"{self._name}.{next(self._numbers)}"

    def refuse(self, name: str) -> None:
        """Report to the other ranks that this one fails to make the call."""
        with contextlib.suppress(Exception):  # the engine has ended
            handle = control.start_barrier(name, self._members(), blocking=False)
            handles.abandon(handle, None)

    def _members(self) -> int:
        return process_sets.check_member(self._set, "process group")

    def _root(self, opts: Any) -> int:
        rank: int = opts.rootRank
        if not 0 <= rank < len(self._ranks):
            raise ValueError(f"rank {rank} is not one of the group, which has {len(self._ranks)}")
        return self._ranks[rank]

    def _work(
        self,
        verb: str,
        name: str,
        handle: int,
        result: Tensors,
        opts: Any = None,
        finish: Callable[[Any], None] | None = None,
    ) -> Work:
        timeout_s = opts.timeout.total_seconds() if opts is not None else 0.0
        return Work(
            f"{verb} '{name}'", handle, result, timeout_s if timeout_s > 0 else self._timeout_s,
            finish, lambda future: callbacks.name(future, self, name),
        )  # fmt: skip

    # -- checks

    def _check_alive(self, verb: str) -> None:
        if self._at_shutdown is None:
            raise ValueError(f"{verb}: {self!r} has been destroyed")

    def _check_count(self, verb: str, what: str, tensors: Sequence[Any]) -> None:
        if len(tensors) != len(self._ranks):
            raise ValueError(
                f"{verb}: there are {len(tensors)} {what}; there must be one for each of the "
                f"{len(self._ranks)} ranks of the group"
            )

    def _check_whole(
        self, verb: str, what: str, whole: torch.Tensor, of_what: str, part: torch.Tensor
    ) -> None:
        if whole.numel() != part.numel() * len(self._ranks) or whole.dtype != part.dtype:
            raise ValueError(
                f"{verb}: the {what} has {whole.numel()} elements of {whole.dtype}; it must have "
                f"{len(self._ranks)} (ranks) times the {part.numel()} of the {of_what}, of "
                f"{part.dtype}"
            )
