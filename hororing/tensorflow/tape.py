"""DistributedGradientTape: a tf.GradientTape whose gradients are reduced over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hororing._adapters.optimizer_options import Reduction
from hororing._requests.arguments import Average
from hororing._requests.compression import Compressor, NoneCompressor
from hororing._requests.process_sets import ProcessSet, global_process_set
from hororing.tensorflow._tensor.tensors import check_devices, checked_weight
from hororing.tensorflow.gradients import (
    checked_key,
    checked_options,
    reduce_gradients,
    step_prefix,
    unique_names,
    variable_key,
)
from hororing.tensorflow.replicas import compare


class Seen:
    """A record of the tapes of this process."""

    over_all_ranks = False  # whether one has reduced all its gradients over all ranks


class _DistributedTape(tf.GradientTape):  # type: ignore[misc]
    """Shares everything with the tape it was made of, except how gradients are made."""

    _options: Reduction
    _local: set[Any]  # keys of variables
    _weight: Any

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: Any = False,
        *,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Return the gradients of `target`, reduced, in the structure of `sources`.

        Gradients that are None stay None; they must be None on all ranks. With `use_generic_names`
        requests are named after positions, not after variables. The result is not differentiable.
        """
        if isinstance(use_generic_names, (str, tf.UnconnectedGradients)):
            # The fourth argument of a tf.GradientTape.
            use_generic_names, unconnected_gradients = False, use_generic_names
        gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)
        flat = tf.nest.flatten(sources)
        prefix = step_prefix("gradients", self._options.process_set)
        names = unique_names(prefix, flat)
        if use_generic_names:
            names = [f"{prefix}/grad_{at}" for at in range(len(flat))]
        keys = [variable_key(source) for source in flat]
        before = compare(
            [each for each, key in zip(flat, keys, strict=True) if key not in self._local],
            self._options.process_set,
        )
        # A gradient in slices is one gradient, though it consists of tensors.
        with tf.control_dependencies(before):
            reduced = reduce_gradients(
                tf.nest.flatten(gradients),
                names,
                self._options,
                keys=keys,
                local=self._local,
                weight=self._weight,
            )
        if self._options.process_set is global_process_set and not self._local:
            Seen.over_all_ranks = True
        return tf.nest.pack_sequence_as(sources, reduced)

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of `source`, a variable, on this rank."""
        self._local.add(checked_key(source, "register_local_source"))

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: Any = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return pairs of a source and what `gradient` returns for it: local ones, and others."""
        flat = tf.nest.flatten(sources)
        gradients = self.gradient(target, flat, output_gradients, use_generic_names)
        pairs = list(zip(flat, gradients, strict=True))
        return (
            [pair for pair in pairs if variable_key(pair[0]) in self._local],
            [pair for pair in pairs if variable_key(pair[0]) not in self._local],
        )


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = NoneCompressor,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    weight: Any = None,
) -> Any:
    """Return a tape that records and watches what `gradtape` does, and reduces its gradients.

    Parameters
    ----------
    gradtape : tf.GradientTape
        A tf.GradientTape, before or after it was used. It itself stays as it is.
    compression : Compressor, optional
        How gradients are sent: Compression.none, .fp16, .bf16 or your own Compressor.
    sparse_as_dense : bool, optional
        Reduce tf.IndexedSlices as dense tensors instead of gathering them.
    op : ReduceOp, optional
        Average, Sum, Min, Max, Product or Adasum.
    gradient_predivide_factor : float, optional
        With op=Average, divide by this before the sum and multiply by it after: against
        overflow of 16-bit floats.
    num_groups : int, optional
        Deprecated; use `groups`.
    groups : int or sequence of sequence, optional
        A number of groups, or lists of variables. A group is reduced in one message when all
        its gradients are ready. Variables in no list are reduced one by one.
    process_set : ProcessSet, optional
        The ranks that reduce with each other; others keep their own gradients.
    scale_local_gradients : bool, optional
        Divide gradients of local sources by the number of ranks.
    device_dense, device_sparse : str, optional
        Accepted for Horovod's sake; no effect.
    weight : float or callable, optional
        With op=Average, how much this rank's gradients count: its number of samples or tokens,
        a number or a tensor of one element, not negative. The result is the sum of the ranks'
        gradients times their weights, divided by the sum of the weights; what is of weight 0
        contributes nothing. Where all weights are 0 gradients are 0: leave the step out, if
        your optimizer has momentum. All ranks pass a weight, or none does. Local sources have
        none.

    Examples
    --------
    >>> with tf.GradientTape() as tape:
    ...     loss = loss_of(model(images), labels)
    >>> tape = hvd.DistributedGradientTape(tape)
    >>> gradients = tape.gradient(loss, model.trainable_variables)
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"gradtape must be a tf.GradientTape, not {type(gradtape).__name__}")
    if isinstance(gradtape, _DistributedTape):
        raise ValueError("gradtape is distributed already; wrap it once")
    check_devices(device_dense, device_sparse)
    what = "DistributedGradientTape"
    options = checked_options(
        what, op=op, gradient_predivide_factor=gradient_predivide_factor,
        compression=compression, sparse_as_dense=sparse_as_dense, num_groups=num_groups,
        groups=groups, process_set=process_set, scale_local_gradients=scale_local_gradients,
    )  # fmt: skip
    # Of the tape's exact class, which a user may have derived. Both share their state, so each has
    # what the other records.
    kind = type(gradtape)
    checked_weight(weight, what)
    state = {"_options": options, "_local": set(), "_weight": weight}
    kind = type(kind.__name__, (_DistributedTape, kind), state)
    tape = object.__new__(kind)
    tape.__dict__ = gradtape.__dict__
    return tape


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = NoneCompressor,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    weight: Any = None,
) -> Any:
    """Like `DistributedGradientTape`, but gradients of `local_layers` stay on this rank.

    `local_layers` is a Keras layer, or a list of them; their trainable weights are local.

    >>> with tf.GradientTape() as tape:
    ...     loss = loss_of(y, model(x))
    >>> tape = hvd.PartialDistributedGradientTape(tape, local_layers=model.layers[-1])
    >>> gradients = tape.gradient(loss, model.trainable_variables)
    """
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op,
        gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients, weight,
    )  # fmt: skip
    for variable in weights_of(local_layers):
        tape.register_local_source(variable)
    return tape


def weights_of(layers: Any) -> Iterable[Any]:
    """Return the trainable weights of a layer, or of several."""
    if layers is None:
        return []
    several = layers if isinstance(layers, (list, tuple)) else [layers]
    for layer in several:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(f"local_layers must be Keras layers, not {type(layer).__name__}")
    return [weight for layer in several for weight in layer.trainable_weights]
