"""Guard: notices, in a training loop of one's own, that ranks have different variables.

The half of `hororing.guard` that knows TensorFlow's variables. See docs/guard.md.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np
import tensorflow as tf

from hororing._adapters.replica_check import Digest, digest
from hororing._requests.process_sets import ProcessSet, global_process_set
from hororing.guard import Finding, Watch
from hororing.guard.comparison import Bytes, Item
from hororing.guard.options import Options, checked
from hororing.guard.sums import Sum, all_of
from hororing.guard.sums import watch as watch_sums
from hororing.tensorflow.gradients import unique_names

# Of a gradient's request: the graph, and what the tape calls its gradients.
_PREFIX: Final = re.compile(r"^(?:.*/)?gradients(?:\.\d+)?/")


class _Variables:
    """Some variables: a `hororing.guard.watch.Source`. Those of Keras have one inside."""

    remedy = "hvd.broadcast_variables(variables, root_rank=0)"

    def __init__(self, variables: Sequence[Any], process_set: ProcessSet) -> None:
        self._process_set = process_set
        inner = [getattr(each, "value", None) for each in variables]
        self._variables = [
            one if value is None or callable(value) else value
            for one, value in zip(variables, inner, strict=True)
        ]
        self.sums()  # forgets those before
        self._begun = False
        self._excluded: dict[str, list[str]] = {}
        self._held: dict[str, tf.Variable] = {}

    def begin(self) -> None:
        """Forget sums before this rank joined. Steps are counted by the caller."""
        if self._begun:
            self.sums()
        self._begun = True

    def settle(self) -> None:
        """Do nothing: sums are looked at, not gradients."""

    def sums(self) -> Sequence[Sum]:
        """See `hororing.guard.watch.Source`."""
        found = all_of(self._process_set.process_set_id or 0, lambda request: request.split(","))
        return [each._replace(name=_PREFIX.sub("", each.name)) for each in found]

    def scale(self) -> None:
        """Return None: the scale of losses is not known."""

    def replaced(self) -> Sequence[str]:
        """Return nothing: the caller has chosen the variables."""
        return ()

    def keep(self, finding: object) -> None:
        """Do nothing: there are no snapshots."""

    def excluded(self) -> Mapping[str, Sequence[str]]:
        """See `hororing.guard.watch.Source`."""
        return self._excluded

    def items(self) -> Iterable[Item]:
        """See `hororing.guard.watch.Source`."""
        self._held, self._excluded = {}, {}
        names = unique_names("guard", self._variables)
        for long_name, variable in zip(names, self._variables, strict=True):
            name = long_name.partition("/")[2]
            if not variable.dtype.is_numpy_compatible:
                self._excluded.setdefault("not numbers", []).append(name)
                continue
            self._held[name] = variable
            array = variable.numpy()
            found = Digest(name, f"{array.dtype}{[*array.shape]}", digest(array))
            yield Item.from_digest("parameter" if variable.trainable else "optimizer", found)

    def read(self, name: str) -> Bytes:
        """See `hororing.guard.watch.Source`."""
        raw = np.frombuffer(bytearray(self._held[name].numpy().tobytes()), np.uint8)
        return cast(Bytes, raw)

    def write(self, name: str, raw: Bytes) -> None:
        """See `hororing.guard.watch.Source`."""
        like = self._held[name].numpy()
        self._held[name].assign(raw.view(like.dtype).reshape(like.shape))


def watch_of(variables: Sequence[Any], options: Options, process_set: ProcessSet) -> Watch:
    """Return what compares these variables."""
    names = unique_names("guard", variables)
    source = _Variables(variables, process_set)
    watch = Watch(f"{names[0]}.of.{len(names)}", source, options, process_set)
    if options.on_nonfinite is not None:
        watch_sums(True)
        weakref.finalize(watch, watch_sums, False)
    return watch


def refuse_skips(what: str, on_nonfinite: str | None) -> None:
    """ValueError for "skip"."""
    if on_nonfinite == "skip":
        raise ValueError(
            f'{what}: on_nonfinite="skip" is for model.fit and hvd.Guard of PyTorch. The script '
            "applies what a tape returns: let it do so only if tf.math.is_finite of all reduced "
            'gradients, which is the same on all ranks, and pass "warn" or "error" here'
        )


class Guard:
    """Compares variables of all ranks while a loop of one's own trains, and names what differs.

    Call `step()` after each training step, outside of graphs, on all ranks. After the first step
    and after every `every` steps, it compares one number: a digest of the bits of all variables.
    Only if it differs do ranks find out which one differs, on which rank, and by how much. Each
    time it also compares whether sums of gradients were not finite.
    ``model.fit`` has `hvd.callbacks.GuardCallback` of hororing.keras.

    Parameters
    ----------
    variables : sequence of tf.Variable or sequence of keras.Variable
        Those of the model and of the optimizer: ``[*model.variables, *optimizer.variables]``.
    every : int
        The number of steps from one comparison to the next.
    on_divergence : str or function
        "error": MismatchError on all ranks. "warn": a warning in the log, again when other
        variables differ. "repair": all ranks get the values that more than half of them have;
        MismatchError if there are none. A function: it is called on all ranks with a finding.
    ignore : iterable of str
        Patterns of names that are not compared, such as ``"*moving_*"`` (`fnmatch`).
    process_set : ProcessSet
        The ranks that train together.
    on_nonfinite : str or None
        What `step` does if a gradient of some rank, or another tensor of floats that was summed
        since the last call, was infinite or NaN. "warn": a warning in the log names it. "error":
        FloatingPointError on all ranks. None: nobody looks. Allreduces are looked at: not slices,
        and what was compressed as it was sent.

    Raises
    ------
    ValueError
        An argument is wrong; on_nonfinite is "skip".

    Examples
    --------
    >>> guard = hvd.Guard([*model.variables, *optimizer.variables], every=100)
    >>> for images, labels in dataset:
    ...     train_step(images, labels)
    ...     guard.step()
    """

    def __init__(
        self,
        variables: Sequence[Any],
        every: int = 100,
        on_divergence: str | Callable[[Finding], object] = "error",
        ignore: Iterable[str] = (),
        process_set: ProcessSet = global_process_set,
        on_nonfinite: str | None = "warn",
    ) -> None:
        options = checked(
            "Guard", every=every, on_divergence=on_divergence, ignore=ignore,
            on_nonfinite=on_nonfinite,
        )  # fmt: skip
        refuse_skips("Guard", on_nonfinite)
        variables = list(variables)
        if not variables:
            raise ValueError("Guard: there are no variables; build the model and optimizer before")
        self._watch = watch_of(variables, options, process_set)
        self._steps = 0

    def step(self) -> None:
        """Count a step; compare what is due, which blocks. Raises as the options say."""
        self._steps += 1
        if self._watch.options.on_nonfinite is not None:
            self._watch.check_sums(self._steps)
        if self._watch.is_due(self._steps):
            self._watch.check(self._steps)

    def report(self) -> dict[str, Any]:
        """Return what was compared and found until now, as plain data."""
        return self._watch.report()
