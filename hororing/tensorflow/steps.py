"""Steps of an elastic job that TensorFlow takes, in a graph or eagerly: hororing.elastic.steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf

from hororing.elastic.steps import Steps
from hororing.tensorflow import tape

# Places in the counts. OWED: to be left out; the others: since the last look.
_OWED: Final = [1, 0, 0, 0]
_LEFT_OUT: Final = [0, 1, 0, 0]
_BEGUN: Final = [0, 0, 1, 0]
_TAKEN: Final = [0, 0, 0, 1]


class CountedSteps:
    """Counts the steps of one optimizer in a variable, since a graph does not call Python.

    Is both the `Stepper` of a state and the `Counter` of its steps.

    Parameters
    ----------
    by_tape : gradients are those of a tape, so that only it can tell whether they are reduced.
    """

    def __init__(self, by_tape: bool = False) -> None:
        self._by_tape = by_tape
        self._steps: Steps | None = None
        with tf.init_scope(), tf.device("CPU:0"):
            self._counts = tf.Variable(tf.zeros(4, tf.int64), trainable=False)

    def take(self, apply: Callable[[], Any], gradients: Sequence[Any]) -> None:
        """Take a step by `apply` when the gradients are there, or leave it out."""
        owes = self._counts[0] > 0
        if tf.executing_eagerly():
            if owes:
                self._skip_owed()
            else:
                self._add(_BEGUN)
                apply()
                self._add(_TAKEN)
            return

        def step() -> None:
            graph = tf.compat.v1.get_default_graph()
            # TensorFlow starts what needs no gradient before they are reduced, or are not.
            there = [each for each in tf.nest.flatten(gradients, True) if each is not None]
            with tf.control_dependencies([tf.identity(each) for each in there]):
                begun = self._add(_BEGUN)
            before = len(graph.get_operations())
            with tf.control_dependencies([begun]):
                apply()
            with tf.control_dependencies(graph.get_operations()[before:]):
                self._add(_TAKEN)

        tf.cond(owes, self._skip_owed, step)

    def _skip_owed(self) -> None:
        self._add([left - owed for left, owed in zip(_LEFT_OUT, _OWED, strict=True)])

    def _add(self, counts: Sequence[int]) -> Any:
        return self._counts.assign_add(tf.constant(counts, tf.int64), read_value=False)

    def attach(self, steps: Steps | None) -> None:
        """Let these look here."""
        if self._steps is not None:
            self._steps.counter = None
        self._steps = steps
        if steps is not None:
            self.begin(0)
            steps.counter = self

    @property
    def agrees(self) -> bool:
        """Whether the gradients are those of all ranks, as far as anybody knows."""
        return not self._by_tape or tape.reduced_over_all_ranks()

    def begin(self, owed: int) -> None:
        """Count from 0, and leave out the first `owed` steps."""
        self._counts.assign([owed, 0, 0, 0])

    def read(self) -> tuple[int, int, int]:
        """Return how many steps were left out, begun and taken since."""
        _, left_out, begun, taken = self._counts.numpy().tolist()
        return left_out, begun, taken


def count_steps_of(optimizer: Any) -> CountedSteps:
    """Count the steps of an optimizer of Keras 3 that is not distributed; a tape is."""
    apply = optimizer.apply
    counted = CountedSteps(by_tape=True)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def counted_apply(grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        counted.take(lambda: apply(grads, trainable_variables), grads)

    optimizer.__dict__["apply"] = counted_apply  # Keras would look into it
    return counted


__all__ = ["CountedSteps", "count_steps_of"]
