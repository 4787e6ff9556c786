"""Reducer: reduces the gradients of one optimizer while backward runs, and before it returns.

Hooks queue gradients. One call of the core sends the queue when it is large enough, and at the end
of the backward pass, because other ranks may wait for it. `Reducer.send_remaining` sends what the
hooks did not, when the last backward pass of a step ends, or `Reducer.synchronize` does if it has
not ended; hooks only send earlier. If several optimizers have gradients in one pass, all of them
send theirs before the first one waits: another rank may lack some, and sends those in `step()`.

Note [Shared parameters]. If several optimizers have a parameter, the newest of them reduces it, as
one of its gradients: an older one may be garbage on some ranks. The step of an older one makes sure
that the newest has reduced. If the optimizers reduce differently (another operation or process
set), each reduces when it steps, and has no hooks.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import torch

from hororing._adapters.optimizer_options import Reduction
from hororing._engine import state, timeline
from hororing._requests import arguments
from hororing._requests import handles as request_handles
from hororing._requests.arguments import Average
from hororing._requests.persistent import ASK, QUEUED, READY, SENT, finish_many
from hororing._requests.process_sets import check_member, global_process_set
from hororing._tensors import finish_gradients
from hororing.torch._optimizer.first_reduction import FirstReduction
from hororing.torch._optimizer.gradient import (
    Gradient,
    changed_in_flight,
    describe_in_flight,
    hookable,
    process_set_changed,
    send_together,
    unexpected_pass,
    unfrozen,
)
from hororing.torch._optimizer.passes import Passes, Phase, collect, queue_callback
from hororing.torch._optimizer.submission import BATCH_BYTES, MIN_SHARE, Group
from hororing.torch._optimizer.weights import Weighing
from hororing.torch._tensor.uncompiled import leave_uncompiled, uncompiled
from hororing.torch._tensor.verbs import adapter

Entry = tuple[torch.Tensor, Gradient]

# The reducers of each parameter, by id(parameter). They hold the parameter, so the id stays valid.
_reducers_of: dict[int, set[Reducer]] = {}
_numbers = itertools.count()


def _begin_anew() -> None:
    """Forget gradients that the last engine has not reduced: its handles are invalid now."""
    for reducer in set[Reducer]().union(*_reducers_of.values()):
        reducer.abandon()


state.at_init(_begin_anew)


class _Ending(threading.local):
    """The reducers that have sent everything at the end of this thread's backward pass."""

    def __init__(self) -> None:
        self.reducers: list[Reducer] = []


_ending = _Ending()


@uncompiled
def _finish_all_reducers() -> None:
    """Wait for all gradients of a backward pass, once all reducers have sent theirs."""
    reducers, _ending.reducers = _ending.reducers, []
    failures: list[Exception] = []
    for reducer in reducers:
        if reducer.phase is Phase.SENT:  # otherwise a step has finished it after an interrupt here
            with collect(failures):
                reducer.finish()
    if failures:
        raise failures[0]


class Reducer(Passes):
    """Reduces the gradients of the parameters of one optimizer.

    `named` gives names to parameters by identity, `prefix` to all others. `groups` are lists of
    parameters that are reduced together. All must be the same on every rank. Only the hooks are
    thread-safe. Call `release` to end it before its optimizer.
    """

    gradient_type = Gradient
    queued: list[Gradient]  # hooks append to it without the lock; it is emptied under it

    def __init__(
        self,
        options: Reduction,
        passes: int,
        optimizer: torch.optim.Optimizer,
        named: Sequence[tuple[str, torch.Tensor]],
        prefix: str,
        groups: Iterable[Sequence[torch.Tensor]],
    ) -> None:
        super().__init__(passes)
        self.options = options
        self.members = check_member(options.process_set, "DistributedOptimizer")
        self.phase = Phase.IDLE
        self.tracing = False
        self.unclassified: list[Gradient] = []  # gradients that wait for the end of a pass
        self.pending: list[int] = []  # handles of started requests that nobody has waited for
        self.queued = []
        self.batch_bytes = self.bytes_left = MIN_SHARE  # of the batch
        self._lock = threading.Lock()
        self._on_device = False  # whether a parameter is on a device
        self._generation = options.process_set.generation
        self._number = next(_numbers)  # the newest has the largest
        self._optimizer = weakref.ref(optimizer)
        self._names = {id(param): (name, param) for name, param in named}
        self._prefix = prefix
        self.weighing = Weighing(f"{prefix}.sum_of_weights", options.process_set, self.members)
        self._gradients: dict[int, Entry] = {}  # by id(parameter)
        self._groups: list[Group] = []
        # See Note [Shared parameters]: whether `step()` reduces; what newer reducers reduce; and
        # those reducers, with their number of reductions at the beginning of this one's step.
        self._reduces_in_step = False
        self._left_out: set[int] = set()
        self._newer: dict[Reducer, int] = {}
        self.reductions = 0
        # As last seen by `follow`: the parameters, and the entries that are not left out.
        self._followed: list[torch.Tensor] = []
        self._entries: list[Entry] = []
        self._failures: list[Exception] = []  # of this step
        self._versions: list[tuple[Gradient, torch.Tensor, int]] = []  # as left by a failed pass
        self.check = FirstReduction(self, optimizer)
        self.release = weakref.finalize(optimizer, self._release)
        self.release.atexit = False
        self.follow()
        self.form_groups(groups)

    def form_groups(self, groups: Iterable[Sequence[torch.Tensor]]) -> None:
        """Reduce these parameters' gradients together. REQUIRES: nothing is in flight."""
        self._groups = []
        for index, members in enumerate(groups):
            gradients = [self._gradients[id(param)][1] for param in members]
            name = f"{self._prefix}.group.{index}:{gradients[0].name}..{gradients[-1].name}"
            group = Group(name, len(gradients))
            for position, gradient in enumerate(gradients):
                gradient.join(group, position)
            self._groups.append(group)

    def follow(self) -> list[Entry]:
        """Return the entries to reduce, for the optimizer's current parameters."""
        optimizer = self._optimizer()
        assert optimizer is not None
        groups = optimizer.param_groups
        params = [param for group in groups for param in group["params"]]
        if len(params) == len(self._followed) and all(map(is_, params, self._followed)):
            return self._entries
        held: dict[int, Entry] = {}  # once, also those that a group has twice
        for number, group in enumerate(groups):
            for index, param in enumerate(group["params"]):
                entry = self._gradients.get(id(param))
                if entry is None:
                    name, _ = self._names.get(id(param), (f"{self._prefix}.{number}.{index}", None))
                    entry = (param, self.gradient_type(name, param, self))
                    self.unclassified.append(entry[1])
                    self._on_device |= entry[1].device != request_handles.HOST
                    self._gradients[id(param)] = entry
                held[id(param)] = entry
        gone = self._gradients.keys() - held.keys()
        changed = [key for key in self._gradients if self._has(key) is (key in gone)]
        for key in changed:  # enter or leave
            _reducers_of.setdefault(key, set()).symmetric_difference_update({self})
        for reducer in {other for key in changed for other in (self, *_reducers_of[key])}:
            reducer.arrange()
        # What the optimizer no longer has is finished once more, if its hook has sent it.
        sent = [entry for key in gone if (entry := self._gradients[key])[1].state >= QUEUED]
        self._entries = [entry for key, entry in held.items() if key not in self._left_out] + sent
        self._followed = params
        return self._entries

    def _has(self, key: int) -> bool:
        """Return whether the optimizer had the parameter in the latest call of `follow`."""
        return self in _reducers_of.get(key, ())

    def arrange(self) -> None:
        """Add or remove hooks; see Note [Shared parameters]."""
        self._reduces_in_step = False
        held = [key for key in self._gradients if self._has(key)]
        self._left_out = {*self._gradients} - {*held}
        newer: dict[Reducer, int] = {}
        for key in held:
            rivals = _reducers_of[key]
            for other in rivals if len(rivals) > 1 else ():
                if (other.options.op, other.members) != (self.options.op, self.members):
                    self._reduces_in_step = True
                elif other._number > self._number:
                    self._left_out.add(key)
                    newer[other] = self._newer.get(other, other.reductions)
        if self._reduces_in_step:
            self._left_out, newer = set(), {}
        self._newer = newer
        for key, (param, gradient) in self._gradients.items():
            if self._reduces_in_step or key in self._left_out:
                gradient.unhook()
            elif gradient.hook is None and hookable(param):
                self._hook(param, gradient)
        self._followed = []

    def _hook(self, param: torch.Tensor, gradient: Gradient) -> None:
        # Backward may run inside a function that torch.compile traces.
        leave_uncompiled(type(gradient).on_gradient)
        register: Any = param.register_post_accumulate_grad_hook  # torch declares no types
        with unfrozen(param):
            gradient.hook = register(gradient.on_gradient)
        self.weighing.arrange(param, gradient)

    def _release(self) -> None:
        """Remove everything from parameters and core, and keep no parameter."""
        self.abandon()
        others: set[Reducer] = set()
        for key, (_, gradient) in self._gradients.items():
            gradient.unhook()
            rivals = _reducers_of.pop(key, set()) - {self}
            if rivals:
                _reducers_of[key] = rivals
            others |= rivals
        self._gradients, self._names, self._entries, self._followed = {}, {}, [], []
        for other in others:
            other.arrange()

    # -- in a backward pass ---------------------------------------------------------------------

    def begin_pass(self, name: str) -> None:
        """Begin a pass. AssertionError if gradients of another pass are in flight."""
        if self.phase in (Phase.FAILED, Phase.SENT):
            self._forget_failed_pass()
        if self.ended >= self.passes:
            op = arguments.op_name(self.options.op)
            raise unexpected_pass(
                name, self.passes, f"would be reduced again, which op={op} does not allow"
            )
        self._check_set()
        if self.weighing.used:
            self.weighing.begin_pass(self)
        self.phase = Phase.FILLING
        self.tracing = timeline.enabled()
        self.batch_bytes = self.bytes_left = MIN_SHARE

    def _check_set(self) -> None:
        """Raise if the process set has changed: ids of sets are reused."""
        process_set = self.options.process_set
        if process_set is global_process_set:
            return
        members = check_member(process_set, "DistributedOptimizer")
        if (members, process_set.generation) != (self.members, self._generation):
            raise process_set_changed(process_set)

    def _forget_failed_pass(self) -> None:
        self._reset_unsent()
        if self.in_flight:
            raise AssertionError(
                f"optimizer: a backward pass after one that was not finished, while "
                f"{describe_in_flight(self.in_flight)}"
            )

    def _reset_unsent(self) -> None:
        """Forget the gradients that were not sent."""
        self._drop_queue()
        for _, gradient in self._gradients.values():
            if gradient.state != SENT:
                gradient.reset()

    def _drop_queue(self) -> None:
        with self._lock:
            for gradient in self.queued:
                gradient.param = None
            self.queued.clear()

    @uncompiled
    def send_queued(self) -> None:
        """Send the queue. An error is raised after everything else has been sent."""
        with self._lock:
            queued = self.queued[:]
            del self.queued[: len(queued)]
            self.batch_bytes = self.bytes_left = min(2 * self.batch_bytes, BATCH_BYTES)
        failures: list[Exception] = []
        if self.tracing:
            for gradient in queued:
                begin_ns = timeline.now_ns()
                gradient.send_alone(gradient.take(), failures, begin_ns)
        elif self._on_device:
            send_together(queued, self.pending, failures)
        else:
            adapter.plain_gradients.send_gradients(queued, self.pending, failures)
        if failures:
            raise failures[0]

    def gradient_repeated(self, gradient: Gradient) -> None:
        """Classify all gradients again: `gradient` was changed while in flight."""
        self._failures.append(changed_in_flight(gradient.name))
        for _, other in self._gradients.values():
            if other.fires_once:
                other.reclassify()

    def pass_failed(self) -> None:
        """Record the versions of the gradients in flight, which must not change now."""
        if self.phase is Phase.FILLING:
            self.phase = Phase.FAILED
        self._versions = [
            (gradient, param.grad, param.grad._version)
            for param, gradient in self._gradients.values()
            if gradient.state == SENT and param.grad is not None
        ]

    # -- at the end of a backward pass ----------------------------------------------------------

    def pass_ended(self) -> None:
        """Reduce the gradients if this was the last pass of a step."""
        self.unclassified = [gradient for gradient in self.unclassified if not gradient.classify()]
        if self.weighing.used:
            self.weighing.pass_ended(self._entries)
        if self.ended >= self.passes and (self.tasks or self.ended > self.passes):
            raise AssertionError(
                "optimizer: backward passes of several threads at once; pass "
                "backward_passes_per_step=their number, and gradients are reduced when the last "
                "of them ends"
            )
        if self.ended < self.passes or self._reduces_in_step or not self.release.alive:
            return
        self.send_remaining()
        _ending.reducers.append(self)
        queue_callback(_finish_all_reducers)  # after those that other optimizers have queued

    def send_remaining(self) -> None:
        """Send the gradients that the hooks did not. `finish` raises the errors."""
        if self.phase is Phase.SENT:
            return
        self._check_set()
        if self.check.is_due:
            self.check.send(self, self._failures)
        if self.weighing.used:
            self.weighing.end_passes(self.passes, hooked=not self._reduces_in_step)
        if self.queued:  # in order of arrival
            with collect(self._failures):
                self.send_queued()
        late = [entry for entry in self.follow() if entry[1].state != SENT]
        with torch.no_grad():
            if late:
                with collect(self._failures):
                    self._send_late(late)
            for group in self._groups:
                with collect(self._failures):
                    group.flush(self.options, self.weighing.current)
            if self.weighing.used:
                with collect(self._failures):
                    self.weighing.send_total()
        self.phase = Phase.SENT

    def _send_late(self, entries: list[Entry]) -> None:
        """Send gradients without their hooks; zeros for missing ones."""
        for param, gradient in entries:
            if param.requires_grad:
                gradient.ensure_gradient(param)
                gradient.param = param
                gradient.note_stream()
                self.queued.append(gradient)
        if self.queued:
            self.send_queued()

    def finish(self) -> None:
        """Wait for all gradients, and put them into `param.grad`.

        An error is raised once nothing is in flight; gradients without an error are reduced then.
        After a KeyboardInterrupt, another call continues.
        """
        self.send_remaining()
        for gradient, grad, version in self._versions:
            if grad._version != version:
                self._failures.append(changed_in_flight(gradient.name))
        self._versions = []
        self.check.receive(self._failures, self.abandon)
        with torch.no_grad():
            self._wait_for(self._entries)
            if self.weighing.used or self._failures:
                self.weighing.finish_total(self._failures)
        for gradient in self.unclassified:
            gradient.state = ASK
        # An interrupt may come before everything is reset.
        self.phase = Phase.IDLE if self._failures else Phase.REDUCED
        failures, self._failures = self._failures, []
        self.reductions += 1
        if self.queued:
            self._drop_queue()
        self.reset_passes()
        if failures:
            raise failures[0]
        if self.options.op != Average:  # only an Average may be reduced again
            self.ended = self.passes

    def _wait_for(self, entries: list[Entry]) -> None:
        """Wait for the gradients of `entries` that are sent, usually in one call of the core."""
        if self._on_device:
            sent = [gradient for _, gradient in entries if gradient.state == SENT]
            requests = [
                each for each in sent if each.address and each.device != request_handles.HOST
            ]
            here = requests[0].stream() if requests else 0
            elsewhere = {int(each.request.stream) for each in requests} - {here}
            complete = not elsewhere and finish_many(self.pending, here)
        else:
            complete = finish_many(self.pending)
        if complete:
            entries = finish_gradients(entries, READY if self.passes == 1 else ASK)  # nearly all
        for param, gradient in entries:
            if gradient.state != SENT:  # it could not be sent, or has been finished
                gradient.reset()
                continue
            if complete and gradient.keep is not None:
                gradient.handle = 0
            with collect(self._failures):
                gradient.finish(param)
        self.pending.clear()  # last, so that after an interrupt another call waits again

    # -- at a step ------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Like `finish`; make sure that newer reducers have reduced shared parameters."""
        due = [other for other, count in self._newer.items() if other.reductions == count]
        if self.phase is not Phase.REDUCED:
            due.append(self)
        for reducer in due:
            reducer.send_remaining()
        for reducer in due:
            reducer.finish()

    @property
    def synchronized(self) -> bool:
        """Whether all gradients are reduced, and there are no newer ones."""
        return self.phase is Phase.REDUCED and all(
            other.reductions != count for other, count in self._newer.items()
        )

    def await_device(self) -> None:
        """Block until the gradients are reduced on the device, not only in stream order."""
        if self._on_device:
            torch.cuda.current_stream().synchronize()

    @property
    def in_flight(self) -> list[str]:
        """Names of the parameters whose gradients are being reduced."""
        if self.phase in (Phase.IDLE, Phase.REDUCED):
            return []
        return [each.name for _, each in self._gradients.values() if each.state >= QUEUED]

    @property
    def reduced(self) -> dict[str, torch.Tensor]:
        """The parameters whose gradients it reduces, by name."""
        return {gradient.name: param for param, gradient in self._entries}

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """The name of each parameter."""
        return {param: gradient.name for param, gradient in self._gradients.values()}

    @property
    def handles(self) -> dict[torch.Tensor, int]:
        """The handle of each gradient that is being reduced; 0 until its group is complete."""
        return {
            param: gradient.handle_in_flight
            for param, gradient in self._gradients.values()
            if gradient.state == SENT
        }

    def restart(self, passes: int | None = None) -> None:
        """Count backward passes from the beginning; gradients are no longer synchronized."""
        if self.phase is Phase.REDUCED:
            self.phase = Phase.IDLE
        self.ended = 0
        self.weighing.reset_passes()
        for other in self._newer:
            self._newer[other] = other.reductions
        if passes is None and self.phase is Phase.IDLE:
            return
        self.passes = passes or self.passes
        self._reset_unsent()

    def abandon(self) -> None:
        """Forget everything in flight."""
        self.weighing.abandon()
        for _, gradient in self._gradients.values():
            gradient.abandon()
        self.pending.clear()
        self._drop_queue()
        self.reset_passes()
        self.phase = Phase.IDLE
        self._failures, self._versions = [], []
