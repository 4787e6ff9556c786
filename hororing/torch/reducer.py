"""Reducer: reduces the gradients of one optimizer while backward runs, and before it returns.

What the hooks did not send, `Reducer.send_rest` sends when the last backward pass of a step ends,
or `Reducer.synchronize` where it has not ended; hooks only make it earlier. When several optimizers
have gradients in one pass, all of them send theirs before the first one waits: another rank may
have none for some of them, and sends those in `step()`. Knows nothing of optimizer steps; see
hororing/torch/optimizer.py for those.

Note [Shared parameters]. A parameter of several optimizers is reduced by the newest of them, as one
of its gradients: an older one may be garbage on some ranks. An older one that steps sees to it that
the newest has reduced. Where the optimizers reduce differently (another operation or process set),
each of them reduces when it steps, and has no hooks.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from typing import Any

import torch

from hororing import collectives, job
from hororing._tensors import finish_gradients
from hororing.arguments import Average
from hororing.prepared import finish_many
from hororing.reduction import Reduction
from hororing.torch.gradient import BY_OWNER, Shared, Slot, queue_callback
from hororing.torch.submission import Group
from hororing.torch.uncompiled import leave_uncompiled, uncompiled

Entry = tuple[torch.Tensor, Slot]

# Which reducers have a parameter, by id(parameter). An entry is alive as long as one of its
# reducers is, and reducers hold their parameters, so an id is never mistaken.
_wanted_by: dict[int, weakref.WeakSet[Reducer]] = {}
_numbers = itertools.count()
_alive: weakref.WeakSet[Reducer] = weakref.WeakSet()


def _begin_anew() -> None:
    """Forget what the last engine has not reduced: its handles mean nothing to this one."""
    for reducer in list(_alive):
        reducer.abandon()


job.at_init(_begin_anew)


class _Ending(threading.local):
    """The reducers that have sent all at the end of a backward pass of this thread."""

    def __init__(self) -> None:
        self.reducers: list[Reducer] = []


_ending = _Ending()


@uncompiled
def _finish_all_reducers() -> None:
    """Wait for all gradients of a backward pass: called when all reducers have sent theirs."""
    reducers, _ending.reducers = _ending.reducers, []
    failures: list[Exception] = []
    for reducer in reducers:
        if reducer._shared.finishing:  # else a step has done so, after an interrupt in here
            with collect(failures):
                reducer.finish()
    if failures:
        raise failures[0]


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
        optimizer: torch.optim.Optimizer,
        named: Sequence[tuple[str, torch.Tensor]],
        prefix: str,
        groups: Iterable[Sequence[torch.Tensor]],
    ) -> None:
        self._number = next(_numbers)  # the newest has the largest
        self._optimizer = weakref.ref(optimizer)
        self._shared = Shared(options, passes, weakref.ref(self))
        self._names = {id(param): (name, param) for name, param in named}
        self._prefix = prefix
        self._slots: dict[int, Entry] = {}  # by id(parameter)
        self._groups: list[Group] = []
        # See Note [Shared parameters]: whether `step()` reduces; what newer reducers reduce; those,
        # with the number of their reductions when this one's step began.
        self._reduces_in_step = False
        self._left_out: set[int] = set()
        self._newer: weakref.WeakKeyDictionary[Reducer, int] = weakref.WeakKeyDictionary()
        self._reductions = 0
        # As `follow` has found them: the parameters of each group, where all of them have hooks or
        # are left out; and the others with their slots.
        self._followed: list[list[torch.Tensor]] = []
        self._entries: list[Entry] = []
        self._failures: list[Exception] = []  # of this step
        self._versions: list[tuple[Slot, torch.Tensor, int]] = []  # as a failed pass left them
        self.follow()
        self.form_groups(groups)
        weakref.finalize(self, _release, self._slots).atexit = False
        _alive.add(self)

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

    def follow(self) -> list[Entry]:
        """Return what is to be reduced of the optimizer's parameters as they are now."""
        optimizer = self._optimizer()
        assert optimizer is not None
        groups = optimizer.param_groups
        if len(groups) == len(self._followed) and all(
            len(group["params"]) == len(known) and all(map(is_, group["params"], known))
            for group, known in zip(groups, self._followed, strict=True)
        ):
            return self._entries
        entries, new = [], []
        for number, group in enumerate(groups):
            for index, param in enumerate(group["params"]):
                entry = self._slots.get(id(param))
                if entry is None:
                    name, _ = self._names.get(id(param), (f"{self._prefix}.{number}.{index}", None))
                    entry = (param, self.slot_type(name, param, self._shared))
                    self._slots[id(param)] = entry
                    _wanted_by.setdefault(id(param), weakref.WeakSet()).add(self)
                    new.append(id(param))
                entries.append(entry)
        left_out = self._left_out
        if new or any(
            slot.hook is None and param.requires_grad and id(param) not in left_out
            for param, slot in entries
        ):
            for reducer in {self, *(other for key in new for other in _wanted_by[key])}:
                reducer.arrange()
        self._entries = [entry for entry in entries if id(entry[0]) not in self._left_out]
        if all(slot.hook is not None for _, slot in self._entries):
            self._followed = [list(group["params"]) for group in groups]
        return self._entries

    def arrange(self) -> None:
        """Have hooks at what is to be reduced here; see Note [Shared parameters]."""
        self._reduces_in_step, self._left_out = False, set()
        newer: dict[Reducer, int] = {}
        for key in self._slots:
            rivals = _wanted_by[key]
            for other in rivals if len(rivals) > 1 else ():
                if other._meaning != self._meaning:
                    self._reduces_in_step = True
                elif other._number > self._number:
                    self._left_out.add(key)
                    newer[other] = self._newer.get(other, other._reductions)
        if self._reduces_in_step:
            self._left_out, newer = set(), {}
        self._newer = weakref.WeakKeyDictionary(newer)
        for key, (param, slot) in self._slots.items():
            if self._reduces_in_step or key in self._left_out:
                _unhook(slot)
            elif slot.hook is None and param.requires_grad:
                self._hook(param, slot)
        self._followed = []

    @property
    def _meaning(self) -> tuple[int, int]:
        return self._shared.options.op, self._shared.members

    def _hook(self, param: torch.Tensor, slot: Slot) -> None:
        # Backward may run inside a function that torch.compile traces.
        leave_uncompiled(type(slot).on_gradient)
        register: Any = param.register_post_accumulate_grad_hook  # torch declares no types
        slot.hook = register(slot.on_gradient)

    # -- at the end of a backward pass ----------------------------------------------------------

    def pass_ended(self, is_last: bool) -> None:
        """Reduce, if it is the last one of a step."""
        if not is_last or self._reduces_in_step:
            return
        self.send_rest()
        _ending.reducers.append(self)
        queue_callback(_finish_all_reducers)  # behind what other optimizers have queued

    def forget_failed_pass(self) -> None:
        """Forget the gradients of a pass that was not finished. AssertionError if some are sent."""
        self._shared.drop_arrived()
        for _, slot in self._slots.values():
            if not slot.sent:
                slot.rest()
        if self.in_flight:
            raise AssertionError(
                f"optimizer: a backward pass after one that was not finished, while "
                f"{describe_in_flight(self.in_flight)}"
            )

    def came_again(self, slot: Slot) -> None:
        """Learn anew how often gradients come; that of `slot` is spoilt."""
        self._failures.append(_spoilt(slot))
        for _, other in self._slots.values():
            if other.proven:
                other.proven, other.seen = False, 0
                self._shared.unproven.append(other)

    def pass_failed(self) -> None:
        """Note the versions of the gradients in flight, which nobody may touch now."""
        self._versions = [
            (slot, param.grad, param.grad._version)
            for param, slot in self._slots.values()
            if slot.sent and param.grad is not None
        ]

    def send_rest(self) -> None:
        """Send the gradients that the hooks did not. Errors are left to `finish`."""
        shared = self._shared
        if shared.finishing:
            return
        shared.check_set()
        if shared.arrived:  # in the order in which they came
            with collect(self._failures):
                shared.send_arrived()
        late = [entry for entry in self.follow() if not entry[1].sent]
        with torch.no_grad():
            with collect(self._failures):
                shared.send_late(late)
            for group in self._groups:
                with collect(self._failures):
                    group.flush(shared.options)
        shared.finishing = True

    def finish(self) -> None:
        """Wait for all gradients, and leave them where they belong.

        An error is raised when nothing is in flight any more; gradients without an error are
        reduced then. After a KeyboardInterrupt another call takes up where it was.
        """
        self.send_rest()
        shared, entries = self._shared, self._entries
        sent = [entry for entry in entries if entry[1].sent]
        for slot, grad, version in self._versions:
            if grad._version != version:
                self._failures.append(_spoilt(slot))
        self._versions = []
        with torch.no_grad():
            finish_all(sent, shared.flying, self._failures)
        if len(sent) < len(entries):
            for _, slot in entries:
                if not slot.sent:
                    slot.rest()
        for slot in shared.unproven:
            slot.left = BY_OWNER
        shared.synchronized = not self._failures  # before all is forgotten, by an interrupt perhaps
        failures, self._failures = self._failures, []
        self._reductions += 1
        shared.rest()
        if failures:
            raise failures[0]
        if shared.options.op != Average:  # which alone may be reduced again
            shared.ended = shared.passes

    # -- at a step ------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Do as `finish`; see to it that newer reducers have reduced what is shared with them."""
        due = [other for other, count in self._newer.items() if other._reductions == count]
        if not self._shared.synchronized:
            due.append(self)
        for reducer in due:
            reducer.send_rest()
        for reducer in due:
            reducer.finish()

    @property
    def synchronized(self) -> bool:
        """Whether all gradients are reduced and no newer ones have come since."""
        return self._shared.synchronized and all(
            other._reductions != count for other, count in self._newer.items()
        )

    def await_device(self) -> None:
        """Block until the gradients are reduced, on a device not only in the stream's order."""
        if self._shared.on_device:
            torch.cuda.current_stream().synchronize()

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
        shared.ended = 0
        for other in self._newer:
            self._newer[other] = other._reductions
        if passes is None and not shared.begun:
            return
        shared.passes = passes or shared.passes
        shared.drop_arrived()
        for _, slot in self._slots.values():
            if not slot.sent:
                slot.rest()

    def abandon(self) -> None:
        """Forget everything in flight."""
        for _, slot in self._slots.values():
            slot.abandon()
        self._shared.rest()
        self._shared.synchronized = False
        self._failures, self._versions = [], []


def finish_all(
    entries: list[Entry],
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


def _landed(entries: list[Entry], flying: list[int]) -> bool:
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


def _release(slots: dict[int, Entry]) -> None:
    """Undo what a reducer did to parameters and core."""
    others: set[Reducer] = set()
    for key, (_, slot) in slots.items():
        _unhook(slot)
        slot.abandon()
        if key in _wanted_by:
            left = set(_wanted_by[key])
            others |= left
            if not left:
                del _wanted_by[key]
    for other in others:
        other.arrange()


def _spoilt(slot: Slot) -> AssertionError:
    return AssertionError(
        f"gradient of '{slot.name}' was changed while it was being reduced, so ranks have "
        "different values; call optimizer.zero_grad() and start the step again, on all ranks"
    )


def describe_in_flight(names: list[str]) -> str:
    """Tell that gradients are on their way, and what to do, as the end of a sentence."""
    return (
        f"{len(names)} gradients, '{names[0]}' the first, are being reduced: a backward pass was "
        "not finished on this rank. Other ranks may wait for the rest of them; first call "
        "optimizer.synchronize(), which reduces the gradients of this rank"
    )
