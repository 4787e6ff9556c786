"""Reducer: reduces the gradients of one optimizer while backward runs, and before it returns.

Hooks queue gradients. One call of the core sends the queue when it is large enough, and at the end
of the backward pass, because other ranks may wait for it. `Reducer.send_remaining` sends what the
hooks did not, when the last backward pass of a step ends, or `Reducer.synchronize` does if it has
not ended; hooks only send earlier. If several optimizers have gradients in one pass, all of them
send theirs before the first one waits: another rank may lack some, and sends those in `step()`.

It has one object for each question: `Step` (what is in flight?), `Gradient` (what does a hook do?),
`Grouping` (who travels together?), `Sharing` (who reduces a parameter of several optimizers?).
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from hororing._adapters.optimizer_options import Reduction
from hororing._engine import state
from hororing._requests import arguments
from hororing._requests.arguments import Average
from hororing._requests.handles import HOST
from hororing._requests.persistent import ASK, READY, SENT, finish_many
from hororing._requests.process_sets import ProcessSet, check_member, global_process_set
from hororing._tensors import finish_gradients
from hororing.torch._optimizer import sharing
from hororing.torch._optimizer.following import Following
from hororing.torch._optimizer.grouping import Entry
from hororing.torch._optimizer.routes import stream_of
from hororing.torch._optimizer.step import (
    Phase,
    collect,
    describe_in_flight,
    queue_callback,
    unexpected_pass,
)
from hororing.torch._tensor.uncompiled import uncompiled


def _begin_anew() -> None:
    """Forget gradients that the last engine has not reduced: its handles are invalid now."""
    for reducer in sharing.owners():
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
        # Otherwise a step has finished it after an interrupt here.
        if reducer.step.phase is Phase.SENT:
            with collect(failures):
                reducer.finish()
    if failures:
        raise failures[0]


class Reducer(Following):
    """Reduces the gradients of the parameters of one optimizer."""

    def __init__(self, options: Reduction, *given: Any) -> None:
        self._generation = options.process_set.generation
        super().__init__(options, *given)

    def arrange(self) -> None:
        """Add and remove hooks; see Note [Shared parameters]."""
        self.sharing.decide()
        super().arrange()

    def rearrange(self) -> None:
        """Add and remove hooks: other optimizers have other parameters now."""
        self.arrange()
        self._followed = []

    # -- in a backward pass ---------------------------------------------------------------------

    def begin_pass(self, name: str) -> None:
        """Begin a pass. AssertionError if gradients of another pass are in flight."""
        step = self.step
        if step.phase in (Phase.FAILED, Phase.SENT):
            self._forget_failed_pass()
        if step.ended >= step.passes:
            op = arguments.op_name(self.options.op)
            raise unexpected_pass(
                name, step.passes, f"would be reduced again, which op={op} does not allow"
            )
        self._check_set()
        if step.weights.used:
            reduced = step.phase is Phase.REDUCED
            step.weights.begin_pass(step.passes, step.ended, reduced=reduced)
        step.begin_pass()

    def _check_set(self) -> None:
        """Raise if the process set has changed: ids of sets are reused."""
        process_set = self.options.process_set
        if process_set is global_process_set:
            return
        members = check_member(process_set, "DistributedOptimizer")
        if (members, process_set.generation) != (self.members, self._generation):
            raise process_set_changed(process_set)

    def _forget_failed_pass(self) -> None:
        self.reset_unsent()
        if self.in_flight:
            raise AssertionError(
                f"optimizer: a backward pass after one that was not finished, while "
                f"{describe_in_flight(self.in_flight)}"
            )

    def pass_failed(self) -> None:
        """Record the versions of the gradients in flight, which must not change now."""
        step = self.step
        if step.phase is Phase.FILLING:
            step.phase = Phase.FAILED
        step.versions = [
            (gradient.name, param.grad, param.grad._version)
            for param, gradient in self._gradients.values()
            if gradient.state == SENT and param.grad is not None
        ]

    # -- at the end of a backward pass ----------------------------------------------------------

    def pass_ended(self) -> None:
        """Reduce the gradients if this was the last pass of a step."""
        step = self.step
        self.grouping.pass_ended()
        step.classify()
        if step.weights.used:
            step.weights.pass_ended(param for param, _ in self._entries)
        if step.ended >= step.passes and (step.tasks or step.ended > step.passes):
            raise AssertionError(
                "optimizer: backward passes of several threads at once; pass "
                "backward_passes_per_step=their number, and gradients are reduced when the last "
                "of them ends"
            )
        if step.ended < step.passes or self.sharing.in_step:
            return
        self.send_remaining()
        _ending.reducers.append(self)
        queue_callback(_finish_all_reducers)  # after those that other optimizers have queued

    def send_remaining(self) -> None:
        """Send the gradients that the hooks did not. `finish` raises the errors."""
        step, weights = self.step, self.step.weights
        if step.phase is Phase.SENT:
            return
        self._check_set()
        self.send_checks()
        if weights.used:
            weights.end_passes(step.passes, hooked=not self.sharing.in_step)
        if step.queued:  # in order of arrival
            with collect(step.failures):
                step.send_queued()
        late = [entry for entry in self.follow() if entry[1].state != SENT]
        with torch.no_grad():
            if late:
                with collect(step.failures):
                    self._send_late(late)
            for group in self.grouping.groups:
                with collect(step.failures):
                    group.flush(weights.current)
            if weights.used:
                with collect(step.failures):
                    weights.send_total()
        step.phase = Phase.SENT

    def _send_late(self, entries: list[Entry]) -> None:
        """Send gradients without their hooks; zeros for missing ones."""
        step = self.step
        for param, gradient in entries:
            if param.requires_grad:
                gradient.ensure_gradient(param)
                gradient.param = param
                gradient.note_stream()
                step.queued.append(gradient)
        if step.queued:
            step.send_queued()

    def finish(self) -> None:
        """Wait for all gradients, and put them into `param.grad`.

        An error is raised once nothing is in flight; gradients without an error are reduced then.
        After a KeyboardInterrupt, another call continues.
        """
        step = self.step
        self.send_remaining()
        step.check_versions()
        self.receive_checks()
        with torch.no_grad():
            self.grouping.before_wait()
            self._wait_for(self._entries)
            self.grouping.after_wait()
            if step.weights.used or step.failures:
                step.weights.finish_total(step.failures)
        self.receive_watch()
        for gradient in step.unclassified:
            gradient.state = ASK
        self.reductions += 1
        failures = step.end()
        if failures:
            raise failures[0]
        if self.options.op != Average:  # only an Average may be reduced again
            step.ended = step.passes

    def _wait_for(self, entries: list[Entry]) -> None:
        """Wait for the gradients of `entries` that are sent, usually in one call of the core."""
        step = self.step
        if step.on_device:
            sent = [gradient for _, gradient in entries if gradient.state == SENT]
            requests = [each for each in sent if each.address and each.device != HOST]
            here = stream_of(requests[0].device) if requests else 0
            elsewhere = {int(each.request.stream) for each in requests} - {here}
            complete = not elsewhere and finish_many(step.pending, here)
        else:
            complete = finish_many(step.pending)
        if complete:
            entries = finish_gradients(entries, READY if step.passes == 1 else ASK)  # nearly all
        for param, gradient in entries:
            if gradient.state != SENT:  # it could not be sent, or has been finished
                gradient.reset()
                continue
            if complete and gradient.keep is not None:
                gradient.handle = 0
            with collect(step.failures):
                gradient.finish(param)
        step.pending.clear()  # last, so that after an interrupt another call waits again

    # -- at a step ------------------------------------------------------------------------------

    @property
    def _reduced(self) -> bool:
        """Whether all gradients are reduced, also by newer reducers."""
        return self.step.phase is Phase.REDUCED and not self.sharing.due()

    @property
    def synchronized(self) -> bool:
        """Whether all gradients are reduced, and ranks agree on what the grouping needs."""
        return self._reduced and self.grouping.agrees

    def synchronize(self) -> None:
        """Reduce what is not reduced, and agree; newer reducers reduce shared parameters."""
        self.grouping.expect_agreement()
        if not self._reduced:
            due = self.sharing.due()
            if self.step.phase is not Phase.REDUCED:
                due.append(self)
            for reducer in due:
                reducer.send_remaining()
            for reducer in due:
                reducer.finish()
        self.grouping.agree()

    def restart(self, passes: int | None = None) -> None:
        """Count backward passes from the beginning, in the grouping as well."""
        self.grouping.restart(reduced=self._reduced)
        super().restart(passes)


def process_set_changed(process_set: ProcessSet) -> ValueError:
    """The error for an optimizer that was made for an earlier set of the same id."""
    return ValueError(
        f"DistributedOptimizer: its process set was removed and registered again, now as "
        f"{process_set}; make the optimizer again, too"
    )
