"""Reducer: sends the gradients of one optimizer while backward still runs.

What the hooks did not send, `Reducer.synchronize` sends; hooks only make it earlier. So a
parameter without a hook (unfrozen a moment ago, or shared with another optimizer) is reduced as
well. Knows nothing of optimizer steps; see hororing/torch/optimizer.py for those.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from typing import Any

import torch

from hororing import collectives
from hororing._tensors import finish_gradients
from hororing.prepared import finish_many
from hororing.reduction import Reduction
from hororing.torch.gradient import Shared, Slot
from hororing.torch.submission import Group
from hororing.torch.uncompiled import leave_uncompiled

# Which reducers want to hook a parameter, by id(parameter). An entry is alive as long as one of
# its reducers is, and reducers hold their parameters, so an id is never mistaken.
_wanted_by: dict[int, weakref.WeakSet[Reducer]] = {}


class Reducer:
    """Reduces the gradients of the parameters of one optimizer.

    `named` gives names to parameters by identity, `prefix` to those that are not in it.
    `groups` are lists of parameters that are reduced together. All must be the same on every
    rank. Not thread-safe but for the hooks.
    """

    slot_type = Slot

    def __init__(
        self,
        options: Reduction,
        passes: int,
        param_groups: list[dict[str, Any]],
        named: Sequence[tuple[str, torch.Tensor]],
        prefix: str,
        groups: Iterable[Sequence[torch.Tensor]],
    ) -> None:
        self._shared = Shared(options, passes)
        self._names = {id(param): (name, param) for name, param in named}
        self._prefix = prefix
        self._slots: dict[int, tuple[torch.Tensor, Slot]] = {}  # by id(parameter)
        self._groups: list[Group] = []
        # As `follow` has found them: the parameters of each group, and their slots; all hooked.
        self._followed: list[list[torch.Tensor]] = []
        self._entries: list[tuple[torch.Tensor, Slot]] = []
        self.follow(param_groups)
        self.form_groups(groups)
        weakref.finalize(self, _release, self._slots).atexit = False

    def form_groups(self, groups: Iterable[Sequence[torch.Tensor]]) -> None:
        """Reduce these parameters' gradients together. REQUIRES: nothing is in flight."""
        self._groups = []
        for index, members in enumerate(groups):
            slots = [self._slots[id(param)][1] for param in members]
            name = f"{self._prefix}.group.{index}:{slots[0].name}..{slots[-1].name}"
            group = Group(name, len(slots))
            for position, slot in enumerate(slots):
                slot.join(group, position)
            self._groups.append(group)

    def follow(self, param_groups: list[dict[str, Any]]) -> list[tuple[torch.Tensor, Slot]]:
        """Return the slots of the optimizer's parameters as they are now, new ones included."""
        if len(param_groups) == len(self._followed) and all(
            len(group["params"]) == len(known) and all(map(is_, group["params"], known))
            for group, known in zip(param_groups, self._followed, strict=True)
        ):
            return self._entries
        entries = []
        for number, group in enumerate(param_groups):
            for index, param in enumerate(group["params"]):
                entry = self._slots.get(id(param))
                if entry is None:
                    name, _ = self._names.get(id(param), (f"{self._prefix}.{number}.{index}", None))
                    entry = (param, self.slot_type(name, param, self._shared))
                    self._slots[id(param)] = entry
                if entry[1].hook is None and param.requires_grad:
                    self._hook(*entry)
                entries.append(entry)
        if all(slot.hook is not None for _, slot in entries):
            self._followed = [list(group["params"]) for group in param_groups]
            self._entries = entries
        return entries

    def _hook(self, param: torch.Tensor, slot: Slot) -> None:
        rivals = _wanted_by.setdefault(id(param), weakref.WeakSet())
        rivals.add(self)
        if len(rivals) == 1:
            # Backward may run inside a function that torch.compile traces.
            leave_uncompiled(type(slot).on_gradient)
            register: Any = param.register_post_accumulate_grad_hook  # torch declares no types
            slot.hook = register(slot.on_gradient)
            return
        # Nobody can know for which of them a backward pass is: each reduces when it steps.
        for other in rivals:
            _unhook(other._slots[id(param)][1])
            other._followed = []

    def synchronize(self, param_groups: list[dict[str, Any]]) -> None:
        """Send what the hooks did not, wait for everything, leave it in the gradients.

        An error is raised when nothing is in flight any more; gradients without an error are
        reduced then. After a KeyboardInterrupt another call takes up where it was.
        """
        shared = self._shared
        shared.check_set()
        entries = self.follow(param_groups)
        failures: list[Exception] = []
        with torch.no_grad():
            late = [entry for entry in entries if not entry[1].sent]
            if not shared.finishing:
                with collect(failures):
                    shared.send_late(late)
                for group in self._groups:
                    with collect(failures):
                        group.flush(shared.options)
                shared.finishing = True
            sent = [entry for entry in entries if entry[1].sent] if late else entries
            finish_all(sent, shared.flying, failures)
        passes = shared.passes
        for _, slot in entries:
            if slot.sent or slot.left != passes:
                slot.rest()
        shared.synchronized = not failures  # before all is forgotten: an interrupt may come here
        shared.rest()
        if failures:
            raise failures[0]

    @property
    def synchronized(self) -> bool:
        """Whether all gradients are reduced and no newer ones have come since."""
        return self._shared.synchronized

    @property
    def in_flight(self) -> list[str]:
        """Names of the parameters whose gradients are being reduced."""
        if not self._shared.begun:
            return []
        return [slot.name for _, slot in self._slots.values() if slot.left == 0 or slot.sent]

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """The name of each parameter."""
        return {param: slot.name for param, slot in self._slots.values()}

    @property
    def handles(self) -> dict[torch.Tensor, int]:
        """The handle of each gradient that is being reduced; 0 until its group is complete."""
        return {param: slot.handle_in_flight for param, slot in self._slots.values() if slot.sent}

    def restart(self, passes: int | None = None) -> None:
        """Count backward passes from the beginning; gradients are no longer synchronized."""
        shared = self._shared
        shared.synchronized = False
        if passes is None and not shared.begun:
            return
        shared.passes = passes or shared.passes
        shared.drop_arrived()
        for _, slot in self._slots.values():
            if not slot.sent:
                slot.left = shared.passes

    def abandon(self) -> None:
        """Forget everything in flight."""
        for _, slot in self._slots.values():
            slot.abandon()
        self._shared.rest()
        self._shared.synchronized = False


def finish_all(
    entries: list[tuple[torch.Tensor, Slot]],
    flying: list[int],
    failures: list[Exception],
) -> None:
    """Wait for the gradients of `entries`, mostly in one call of the core."""
    landed = _landed(entries, flying)
    if landed and entries:
        entries = finish_gradients(entries, entries[0][1].shared.passes)  # almost all
    for param, slot in entries:
        if landed and slot.prepared:
            slot.prepared.handle = 0
        with collect(failures):
            slot.finish(param)
    flying.clear()  # last: an interrupt leaves them, to be waited for again


def _landed(entries: list[tuple[torch.Tensor, Slot]], flying: list[int]) -> bool:
    """Wait for all that flies. False: each slot has to see for itself."""
    if not entries or not entries[0][1].shared.on_device:
        return finish_many(flying)
    slots = [slot for _, slot in entries if slot.prepared and slot.device != collectives.HOST]
    here = slots[0].stream() if slots else 0
    computed_in = {int(slot.prepared.request.stream) for slot in slots if slot.prepared}
    return computed_in <= {here} and finish_many(flying, here)


@contextlib.contextmanager
def collect(failures: list[Exception]) -> Iterator[None]:
    """Put an error into `failures` instead of raising it."""
    try:
        yield
    except Exception as error:  # the caller raises it
        failures.append(error)


def _unhook(slot: Slot) -> None:
    if slot.hook is not None:
        slot.hook.remove()
        slot.hook = None


def _release(slots: dict[int, tuple[torch.Tensor, Slot]]) -> None:
    """Undo what a reducer did to parameters and core."""
    for key, (_, slot) in slots.items():
        _unhook(slot)
        slot.abandon()
        if not _wanted_by.get(key, True):
            del _wanted_by[key]
