"""The weights of an optimizer's backward passes: how much each counts in the average.

Over the passes of a step, a gradient is the weighted mean of the passes so far. Before pass p is
added, with the weight n[p] and N[p] = n[1] + ... + n[p], the current value is multiplied by N[p -
1] / N[p], and the added one by n[p] / N[p]. The last pass sends that mean with the weight N[p].
Nothing exceeds the range of 16-bit floats.

The requests of all gradients read one number, so the cost of a new weight does not depend on their
number. Another request sums the weights, for the case that all are 0, and for compressed gradients:
their errors count like gradients of weight 1, so each rank multiplies its gradients by its weight
relative to the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from hororing._engine.core import fail
from hororing._requests import arguments
from hororing._requests.handles import HOST
from hororing._requests.persistent import PersistentAllreduce, new_weight, start_many
from hororing._requests.process_sets import ProcessSet
from hororing.torch._tensor.adapter import DTYPES
from hororing.torch._tensor.verbs import verbs


def checked_weight(weight: Any, op: int) -> float | None:
    """Return a valid weight of an optimizer. TypeError, ValueError for others."""
    number = arguments.check_weight(weight, "DistributedOptimizer")
    if number is None:
        return None
    if op != arguments.Average:
        raise ValueError(
            f"DistributedOptimizer: weight is for op=Average only, not op={arguments.op_name(op)}"
        )
    if not 0 <= number < math.inf:
        raise ValueError(f"DistributedOptimizer: weight={weight} must be finite and not negative")
    return number


class Weights:
    """The weights of one optimizer. `name` is the name of the request that sums them."""

    def __init__(self, name: str, members: ProcessSet, number_of_set: int) -> None:
        self.weight: float | None = None  # of later passes; None: all have the same weight
        self.used = False  # whether there has been a weight, or a sum of weights
        self.cell = new_weight()  # this rank's weight, over all passes; the requests read it
        self.sent: float | None = None  # weight of the latest gradients
        self.all_zero = False  # all ranks' weights were 0 in the completed reduction
        self._passes = 1  # number of passes for which hooks are set
        self._begun = False  # a pass of this step has begun
        self._ended = 0.0  # weight of the passes of this step that have ended
        self._parts: tuple[float, float] | None = None  # of these and of this pass, from the 2nd
        self._weighed: set[int] = set()  # ids of the gradients' parameters, in this pass
        # Sums over ranks: the weights, the weights times `_small`, and how many ranks have one.
        self._total = torch.zeros(3, dtype=torch.float64, device="cpu")
        self._started = self._checks = False  # sum started; all need a weight
        self._problem: Exception | None = None  # the error of the sum
        self._name, self._members = name, members
        self._request = PersistentAllreduce(HOST)
        self._request.prepare(
            name, DTYPES[torch.float64], (3,), arguments.Sum, process_set=number_of_set
        )

    @property
    def current(self) -> float | None:
        """The weight of gradients that are sent now."""
        return None if self.weight is None else float(self.cell[0])

    @property
    def weighs_passes(self) -> bool:
        """Whether a gradient is a mean over several passes, for which `weigh` must be called."""
        return self.weight is not None and self._passes > 1

    def set(self, weight: float | None, passes: int, ended: int) -> bool:
        """Set the weight of later passes, or none. REQUIRES: no pass runs.

        Of `passes` per step, `ended` are over. Returns whether requests and hooks must follow.
        """
        changes = (weight is None) != (self.weight is None)
        if changes and ended and passes > 1:
            raise AssertionError(
                f"optimizer: weight = {weight} after the first backward pass of a step, which had "
                f"{'none' if self.weight is None else 'one'}; set it before the first one"
            )
        changes = changes or self._passes != passes
        self.weight, self._passes = weight, passes
        self.used |= weight is not None
        return changes

    def reset_passes(self) -> None:
        """Forget all passes."""
        self._begun, self._ended, self._parts = False, 0.0, None

    def begin_pass(self, passes: int, ended: int, *, reduced: bool) -> None:
        """Add the weight of a pass to the weights of the step's earlier passes."""
        if self.weight is None:
            return
        if passes == 1:
            self._begun, self.cell[0] = True, self.weight
            return
        if reduced:
            raise AssertionError(
                "optimizer: a backward pass after the gradients were reduced, which have no weight "
                "beside those of its backward_passes_per_step passes; call step() or zero_grad() "
                "(of the optimizer, not of the model) first"
            )
        total = self._ended + self.weight
        if ended:
            self._parts = (self._ended / total, self.weight / total) if total else (0.0, 0.0)
        self._begun, self.cell[0] = True, total
        self._weighed.clear()

    def end_passes(self, passes: int, *, hooked: bool) -> None:
        """Use the weight of the only pass if no hook has begun it."""
        if self.weight is None or self._begun:
            return
        if passes > 1 and not hooked:
            raise NotImplementedError(
                "optimizer: weight and backward_passes_per_step for parameters that several "
                "optimizers reduce in different ways; use one backward pass per step"
            )
        self.cell[0] = self.weight

    def weigh(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
        """Scale `param.grad`, and return what this pass adds to it. None: `grad` itself."""
        if self._parts is None:
            return None
        self._scale(param)
        return _times(grad, self._parts[1])

    def pass_ended(self, params: Iterable[torch.Tensor]) -> None:
        """Scale the gradients to which this pass has added nothing."""
        if self.weight is None:
            return
        self._ended = self.cell[0]
        if self._parts is not None:
            for param in params:
                self._scale(param)

    @torch.no_grad()
    def _scale(self, param: torch.Tensor) -> None:
        assert self._parts is not None
        if param.grad is not None and id(param) not in self._weighed:
            param.grad.copy_(_times(param.grad, self._parts[0]))
        self._weighed.add(id(param))

    def send_total(self, *, always: bool = False) -> None:
        """Start the sum of the ranks' weights, once in a step.

        always : all ranks call it, also those without a weight, and `wait_total` compares them.
        """
        self._checks |= always
        if self._started:
            return
        self.sent, self.all_zero = self.current, False
        if always or self.sent is not None:
            self._start_total()

    def _start_total(self) -> None:
        self.used = True
        weight = self.sent or 0.0
        values = [weight, weight * self._small, float(self.sent is not None)]
        self._total.copy_(torch.tensor(values, dtype=torch.float64, device="cpu"))
        started, code = start_many([self._request], [self._total.data_ptr()], [self._total], [])
        if not started:
            fail(code)
        self._started = True

    @property
    def _small(self) -> float:
        """A power of two; a sum of weights that are multiplied by it is finite."""
        return 0.5 ** len(self._members.ranks).bit_length()

    @property
    def total_is_known(self) -> bool:
        """Whether `wait_total` returns at once."""
        return self._request.is_complete

    def wait_total(self) -> None:
        """Wait for the sum, if it was started; `relative` raises its error."""
        if not self._request.handle:
            return
        try:
            self._request.wait_in()
            count, size = int(self._total[2]), len(self._members.ranks)
            if self._checks and 0 < count < size:
                # This request fails and lists the ranks, unless the others have joined.
                verbs.allreduce(
                    torch.zeros(1, device="cpu"), name=f"{self._name}.ranks",
                    op=arguments.Average, process_set=self._members, weight=self.sent,
                )  # fmt: skip
            self.all_zero = count > 0 and float(self._total[0]) == 0
        except Exception as error:
            self._problem = error

    def relative(self) -> float:
        """Return this rank's weight, relative to the mean over ranks. REQUIRES: `wait_total`."""
        if self._problem is not None:
            raise self._problem
        if self.sent is None or self.all_zero:
            return 1.0
        total, weight = float(self._total[0]), self.sent
        if total > 1:  # it may be infinite
            total, weight = float(self._total[1]), weight * self._small
        return weight * len(self._members.ranks) / total

    def finish_total(self, failures: list[Exception]) -> None:
        """Wait for the sum, if it was started, and forget all passes.

        After failures abandon the sum: other ranks may never start it. But if only some ranks have
        weights, all get that error, and ranks without one start the sum now, so no request is left.
        """
        differ = any("weights differ" in str(error) for error in failures)
        if differ and not self._started:
            self._start_total()
        if failures and not differ:
            self._abandon_total()
        self.wait_total()
        if self._problem is not None and not failures:
            failures.append(self._problem)
        self._started, self._checks, self._problem = False, False, None
        self.reset_passes()

    def abandon(self) -> None:
        """Forget everything in flight, and all passes."""
        self._abandon_total()
        self.reset_passes()

    def _abandon_total(self) -> None:
        if self._request.handle:
            self._request.abandon()
            self._total = torch.zeros_like(self._total)  # the core may still write to the old one
        self._started, self._checks, self._problem = False, False, None


def _times(grad: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply; 0 times anything is 0."""
    return grad * factor if factor else torch.zeros_like(grad)
