"""Counts the steps of elastic training in TensorFlow: see hororing.elastic.steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf

from hororing.elastic.steps import Steps
from hororing.tensorflow import tape

# Places in the counts. _TO_REPLAY: steps to skip; the others: since the last read.
_TO_REPLAY: Final = [1, 0, 0, 0]
_SKIPPED: Final = [0, 1, 0, 0]
_BEGUN: Final = [0, 0, 1, 0]
_TAKEN: Final = [0, 0, 0, 1]


class CountedSteps:
    """Counts the steps of one optimizer in a variable, because a graph does not call Python.

    Is both the `Stepper` of a state and the `Counter` of its steps.

    Parameters
    ----------
    by_tape : bool, optional
        Gradients come from a tape, so only the tape knows whether they are reduced.
    """

    def __init__(self, by_tape: bool = False) -> None:
        self._by_tape = by_tape
        self._steps: Steps | None = None
        with tf.init_scope(), tf.device("CPU:0"):
            self._counts = tf.Variable(tf.zeros(4, tf.int64), trainable=False)

    def take(self, apply: Callable[[], Any], gradients: Sequence[Any]) -> None:
        """Take a step by `apply` when the gradients are reduced, or skip it."""
        owes = self._counts[0] > 0
        if tf.executing_eagerly():
            if owes:
                self._skip_replayed()
            else:
                self._add(_BEGUN)
                apply()
                self._add(_TAKEN)
            return

        def step() -> None:
            graph = tf.compat.v1.get_default_graph()
            # TensorFlow may start other operations before the reduction, or if it fails.
            there = [each for each in tf.nest.flatten(gradients, True) if each is not None]
            with tf.control_dependencies([tf.identity(each) for each in there]):
                begun = self._add(_BEGUN)
            before = len(graph.get_operations())
            with tf.control_dependencies([begun]):
                apply()
            with tf.control_dependencies(graph.get_operations()[before:]):
                self._add(_TAKEN)

        tf.cond(owes, self._skip_replayed, step)

    def _skip_replayed(self) -> None:
        self._add([left - owed for left, owed in zip(_SKIPPED, _TO_REPLAY, strict=True)])

    def _add(self, counts: Sequence[int]) -> Any:
        return self._counts.assign_add(tf.constant(counts, tf.int64), read_value=False)

    def attach(self, steps: Steps | None) -> None:
        """Count for these steps from now on."""
        if self._steps is not None:
            self._steps.counter = None
        self._steps = steps
        if steps is not None:
            self.begin(0)
            steps.counter = self

    @property
    def agrees(self) -> bool:
        """Whether the gradients are reduced over all ranks, as far as known."""
        return not self._by_tape or tape.Seen.over_all_ranks

    def begin(self, owed: int) -> None:
        """Count from 0, and skip the first `owed` steps."""
        self._counts.assign([owed, 0, 0, 0])

    def read(self) -> tuple[int, int, int]:
        """Return how many steps were skipped, begun and taken since."""
        _, left_out, begun, taken = self._counts.numpy().tolist()
        return left_out, begun, taken


def count_steps_of(optimizer: Any) -> CountedSteps:
    """Count the steps of a Keras 3 optimizer that is not distributed, with a distributed tape."""
    apply = optimizer.apply
    counted = CountedSteps(by_tape=True)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def counted_apply(grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        counted.take(lambda: apply(grads, trainable_variables), grads)

    optimizer.__dict__["apply"] = counted_apply  # otherwise Keras would track it
    return counted
