"""The comparison of the variables of a distributed tape: see hororing/_adapters/replica_check.py.

It is part of the second reduction since `init` or `join`, because scripts broadcast after the first
step, which creates variables. A graph counts its steps in a variable, because it does not call
Python. Both the count and the request belong to the first variable, not to a graph, which each rank
may trace again at another time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakSet

import tensorflow as tf

from hororing._adapters.replica_check import Digest, ReplicaCheck, digest, may_differ
from hororing._engine import state
from hororing._requests.process_sets import ProcessSet
from hororing.guard import Watch
from hororing.guard.options import from_environment
from hororing.tensorflow.gradients import unique_names
from hororing.tensorflow.guard import refuse_skips, watch_of

_REMEDY: Final = (
    "Call hvd.broadcast_variables(model.variables, root_rank=0) before the first step or after it, "
    "for those of the optimizer as well, and after hvd.join(). HORORING_CHECK_PARAMETERS=0 turns "
    "this check off"
)
_CHECKS: Final = "_hororing_checks"  # an attribute of the first variable


class _Check(ReplicaCheck):
    """The comparison of some variables. `in_graphs` counts their reductions in this era."""

    def __init__(self, process_set: ProcessSet) -> None:
        super().__init__("DistributedGradientTape", process_set, _REMEDY)
        self.in_python = 0
        self.options = from_environment()  # of its guard
        self.watch: Watch | None = None
        if self.options is not None:
            refuse_skips("HORORING_GUARD", self.options.on_nonfinite)
        with tf.init_scope(), tf.device("CPU:0"):
            self.in_graphs = tf.Variable(0, trainable=False, dtype=tf.int64)
        _living.add(self)

    @property
    def looks(self) -> bool:
        """Whether each reduction asks what the sums of the one before were."""
        return self.options is not None and self.options.on_nonfinite is not None

    def restart(self) -> None:
        """Count from 0 again."""
        self.in_python = 0
        with tf.init_scope():
            self.in_graphs.assign(0)

    def look(self, variables: Sequence[tf.Variable], begun: int) -> None:
        """Compare the variables in the reduction of this number, if that is due. Blocks."""
        if begun == 2 and may_differ(self._process_set):
            self.run(variables)
        if self.options is not None:
            if self.watch is None:
                self.watch = watch_of(variables, self.options, self._process_set)
            if self.looks and begun > 1:
                self.watch.check_sums(begun - 1)
            if self.watch.is_due(begun - 1):
                self.watch.check(begun - 1)

    def run(self, variables: Sequence[tf.Variable]) -> None:
        """Compare the variables now. Blocks."""
        names = unique_names("parameters", variables)
        self.start(f"{names[0]}.of.{len(names)}", lambda: map(_digest, names, variables))
        if self.is_started:
            self.finish()


_living: WeakSet[_Check] = WeakSet()


def _restart() -> None:
    for check in list(_living):
        check.restart()


state.at_era(_restart)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def compare(sources: Sequence[Any], process_set: ProcessSet) -> list[tf.Tensor]:
    """Compare the variables among `sources`, if that is due. In a graph, add the operations.

    Returns what has to run before the reduction.
    """
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return []
    if not may_differ(process_set) and (len(process_set.ranks) < 2 or from_environment() is None):
        return []
    variables = [each for each in map(_variable, sources) if each is not None]
    if not variables:
        return []
    checks = variables[0].__dict__.setdefault(_CHECKS, {})
    key = process_set.process_set_id, len(variables)
    if key not in checks:
        checks[key] = _Check(process_set)
    check = checks[key]
    if tf.executing_eagerly():
        check.in_python += 1
        check.look(variables, check.in_python)
        return []
    begun = check.in_graphs.assign_add(1)

    def now() -> tf.Tensor:
        # A graph orders operations by the resources among their inputs. The reads make the
        # variables inputs of this condition, so that no later assignment overtakes it.
        with tf.control_dependencies([each.read_value() for each in variables]):
            look = tf.py_function(lambda count: check.look(variables, int(count)), [begun], [])
        with tf.control_dependencies([look]):
            return tf.constant(0)

    due = tf.equal(begun, 2)
    if check.looks:
        due = begun > 0
    elif check.options is not None and check.options.every:
        due |= (begun > 1) & tf.equal((begun - 1) % check.options.every, 0)
    looked = tf.cond(due, now, lambda: tf.constant(0))
    return [looked] if check.looks else []


def _variable(source: Any) -> tf.Variable | None:
    inner = getattr(source, "value", None)
    inner = source if inner is None or callable(inner) else inner
    return inner if isinstance(inner, tf.Variable) and inner.dtype.is_numpy_compatible else None


def _digest(name: str, variable: tf.Variable) -> Digest:
    array = variable.numpy()
    return Digest(name.partition("/")[2], f"{array.dtype}{[*array.shape]}", digest(array))
