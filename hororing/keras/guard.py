"""GuardCallback: notices, during ``model.fit``, that ranks no longer train the same model.

The half of `hororing.guard` that knows Keras. Replicas are compared at the end of a batch. The
optimizer looks at gradients in the train step (flags.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from hororing._adapters.replica_check import Digest, digest
from hororing._requests.names import without_numbers
from hororing._requests.process_sets import ProcessSet, global_process_set
from hororing.guard import Finding, Watch
from hororing.guard.comparison import Bytes, Item
from hororing.guard.options import checked
from hororing.keras.distributed import Distributed, shared_variables
from hororing.keras.flags import Flags


class _Variables:
    """The variables of a model and its optimizer: a `hororing.guard.watch.Source`."""

    remedy = "callbacks.BroadcastGlobalVariablesCallback(0)"

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        self._callback = callback
        self._excluded: dict[str, list[str]] = {}
        self._held: dict[str, tuple[str, Any]] = {}

    @property
    def _model(self) -> Any:
        """The model; on JAX, reading this brings its variables up to date."""
        return self._callback.model

    def begin(self) -> None:
        """Do nothing: Keras counts steps in a variable."""

    def settle(self) -> None:
        """Do nothing: the variables are read at the end of a batch."""

    def sums(self) -> Sequence[Any]:
        """Return nothing: the optimizer looks at gradients."""
        return ()

    def scale(self) -> float | None:
        """See `hororing.guard.watch.Source`."""
        scale = getattr(self._model.optimizer, "dynamic_scale", None)
        return None if scale is None else float(ops.convert_to_numpy(scale))

    def replaced(self) -> Sequence[str]:
        """See `hororing.guard.watch.Source`: Keras' optimizers refuse other variables."""
        return ()

    def keep(self, finding: object) -> None:
        """Do nothing: there are no snapshots."""

    def excluded(self) -> Mapping[str, Sequence[str]]:
        """See `hororing.guard.watch.Source`."""
        return self._excluded

    def _listed(self) -> Iterator[tuple[str, Any]]:
        model, optimizer = self._model, self._model.optimizer
        own = {id(each): why for why, several in self._own() for each in several}
        for variable in model.variables:
            if id(variable) in own:
                name = without_numbers(str(variable.path))
                self._excluded.setdefault(own[id(variable)], []).append(name)
            else:
                yield "parameter" if variable.trainable else "buffer", variable
        for variable in shared_variables(optimizer):
            if id(variable) not in own:
                yield "optimizer" if variable.shape else "setting", variable

    def _own(self) -> Iterator[tuple[str, Iterable[Any]]]:
        """Yield what each rank has of its own."""
        for layer in self._model._flatten_layers():
            norm = isinstance(layer, keras.layers.BatchNormalization)
            ours = type(layer).__module__.startswith("hororing.")  # SyncBatchNormalization
            if norm and not layer.synchronized and not ours:
                yield "batch norm", layer.non_trainable_variables
            for each in vars(layer).values():
                if isinstance(each, keras.random.SeedGenerator):
                    yield "random state", [each.state]
        optimizer = self._model.optimizer
        if isinstance(optimizer, Distributed):
            state = optimizer._hororing
            yield "local", state.local_variables
            yield "local", (each for layer in state.local_layers for each in layer.weights)

    def items(self) -> Iterable[Item]:
        """See `hororing.guard.watch.Source`."""
        self._excluded, self._held = {}, {}
        for of, variable in self._listed():
            name = unique = without_numbers(str(variable.path))
            number = 1
            while unique in self._held:
                number += 1
                unique = f"{name} ({number})"
            self._held[unique] = of, variable
            array = _values(of, variable)
            kind = f"{array.dtype}{[*array.shape]}"
            yield Item.from_digest(of, Digest(unique, kind, digest(array)))

    def read(self, name: str) -> Bytes:
        """See `hororing.guard.watch.Source`."""
        array = _values(*self._held[name])
        return np.frombuffer(bytearray(array.tobytes()), np.uint8)

    def write(self, name: str, raw: Bytes) -> None:
        """See `hororing.guard.watch.Source`."""
        of, variable = self._held[name]
        like = _values(of, variable)
        value = raw.view(like.dtype).reshape(like.shape)
        variable.assign(value.astype(ops.convert_to_numpy(variable).dtype))


def _values(of: str, variable: Any) -> np.ndarray[Any, Any]:
    """Return the elements of a variable. Numbers are float64."""
    array = np.asarray(ops.convert_to_numpy(variable))
    return array.astype(np.float64) if of == "setting" else array


class GuardCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Compares the replicas of all ranks while they train, and names what differs.

    After the first batch and after every `every` batches, ranks compare one number: a digest of the
    bits of all variables of the model and its optimizer. Only if it differs do they find out which
    variable differs, on which rank, and by how much. Not compared, and listed in `report()`: the
    statistics of batch norm, random states, local variables. Pass it on all ranks, after the
    callback that broadcasts.

    Parameters
    ----------
    every : int
        The number of batches from one comparison to the next; 0: none.
    on_divergence : str or function
        "error": MismatchError on all ranks. "warn": a warning in the log, again when other
        variables differ. "repair": all ranks get the values that more than half of them have;
        MismatchError if there are none. A function: it is called on all ranks with a finding.
    ignore : iterable of str
        Patterns of paths that are not compared, such as ``"*/moving_*"`` (`fnmatch`).
    on_nonfinite : str or None
        What happens when a gradient of some rank is infinite or NaN, before it is reduced. "warn":
        a warning in the log names the variable and the ranks. "error": FloatingPointError on all
        ranks, which have not applied the gradients. "skip": no rank applies them. With a
        `LossScaleOptimizer`, which skips such steps itself, only at scales of 1 or less. None, and
        always on JAX and with op=Adasum: nobody looks.
    max_skips : int
        FloatingPointError on all ranks after so many skipped batches in a row.

    Raises
    ------
    ValueError : an argument is wrong; on JAX: on_nonfinite is "error" or "skip".

    Examples
    --------
    >>> guard = hvd.callbacks.GuardCallback(every=100)
    >>> model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), guard])
    """

    def __init__(
        self,
        every: int = 100,
        on_divergence: str | Callable[[Finding], object] = "error",
        ignore: Iterable[str] = (),
        on_nonfinite: str | None = "warn",
        max_skips: int = 10,
    ) -> None:
        super().__init__()
        self._options = checked(
            "GuardCallback", every=every, on_divergence=on_divergence, ignore=ignore,
            on_nonfinite=on_nonfinite, max_skips=max_skips,
        )  # fmt: skip
        if keras.backend.backend() == "jax" and on_nonfinite in ("error", "skip"):
            raise ValueError(
                f'GuardCallback: on_nonfinite="{on_nonfinite}" is not for JAX, where gradients are '
                "not looked at; use jax_debug_nans, or keras.callbacks.TerminateOnNaN"
            )
        self._watch: Watch | None = None
        self._flags: Flags | None = None
        self._count = 0
        self._batch = -1  # of this epoch, the latest

    def set_model(self, model: Any) -> None:
        """Watch another model."""
        super().set_model(model)
        optimizer = getattr(model, "optimizer", None)
        process_set: ProcessSet = global_process_set
        if isinstance(optimizer, Distributed):
            process_set = optimizer._settings.process_set
        self._watch = Watch(
            f"keras.{without_numbers(str(model.name))}", _Variables(self), self._options,
            process_set,
        )  # fmt: skip

    def on_train_begin(self, logs: Any = None) -> None:
        """Make the optimizer look at gradients."""
        optimizer = self.model.optimizer
        looks = self._options.on_nonfinite is not None and keras.backend.backend() != "jax"
        if looks and isinstance(optimizer, Distributed):
            skips = self._options.on_nonfinite != "warn" and not hasattr(optimizer, "dynamic_scale")
            self._flags = Flags(skips=skips).attach(optimizer._hororing)
        self._batch = -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note that batches are counted from 0 again."""
        self._batch = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Compare, if it is time."""
        assert self._watch is not None
        before = self._count
        self._count += batch - self._batch
        self._batch = batch
        every = self._options.every
        if self._flags is not None:
            self._read_flags(self._flags)
        if every and (before == 0 or before // every != self._count // every):
            self._watch.check(self._count)

    def _read_flags(self, flags: Flags) -> None:
        """Report the gradients that were not finite in the latest batches."""
        assert self._watch is not None
        notes = flags.take()
        self._watch.exchange_notes(self._count - 1, notes is not None, notes or ())

    def report(self) -> dict[str, Any]:
        """Return what was compared and found until now, as plain data; see `hvd.Guard` of torch."""
        if self._watch is None:
            raise RuntimeError("GuardCallback: no training has begun")
        return self._watch.report()
