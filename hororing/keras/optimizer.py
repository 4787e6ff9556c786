"""The functions that make an optimizer distributed, and load a model with one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hororing._adapters.optimizer_options import checked_settings
from hororing._requests.arguments import Average
from hororing._requests.compression import Compressor, NoneCompressor
from hororing._requests.process_sets import ProcessSet, global_process_set
from hororing.keras.wrapping import wrapped


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = NoneCompressor,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make `optimizer` reduce its gradients over all ranks, and return it.

    The given optimizer itself becomes distributed and keeps its state. Files hold it as a plain
    optimizer, which must be passed to this function again after loading. A copy of a model
    (clone_model, deepcopy) has a plain optimizer, too; a copy of the optimizer alone is
    distributed. Ranks must agree on which variables have no gradient.

    Under the policy mixed_float16, the result is a LossScaleOptimizer around the given one, as
    ``model.compile`` would make it, but all ranks see infinities of one rank.

    Parameters
    ----------
    optimizer : Optimizer
        Any optimizer of Keras 3.
    name : str, optional
        Prefix of the names of its requests, in messages and the timeline.
    device_dense, device_sparse : str, optional
        Accepted for Horovod's sake; no effect.
    compression : Compressor, optional
        How gradients are sent: Compression.none, .fp16, .bf16 or your own Compressor.
    sparse_as_dense : bool, optional
        Reduce gradients of embeddings as dense tensors. Without it, TensorFlow gathers them; on
        other backends they are dense anyway.
    gradient_predivide_factor : float, optional
        With op=Average, divide by this before the sum and multiply by it after: against
        overflow of 16-bit floats.
    op : ReduceOp, optional
        Average, Sum, Min, Max or Product; or Adasum: each rank updates its variables with its
        own gradients, and the changes are combined. Optimizer variables then differ between
        ranks.
    num_groups : int, optional
        Deprecated; use `groups`.
    groups : int or sequence of sequence, optional
        A number of groups, or lists of variables. A group is reduced in one message. Variables
        in no list are reduced one by one.
    backward_passes_per_step : int, optional
        Number of batches for one update: gradients are added up, then reduced. `iterations`,
        and therefore schedules, count updates. Keras' own ``gradient_accumulation_steps``
        works, too, but reduces every batch's gradients. ValueError if a later call of ``apply``
        has other variables.
    average_aggregated_gradients : bool, optional
        Divide the sum by the number of batches.
    process_set : ProcessSet, optional
        The ranks that reduce with each other. Ranks outside it train alone.
    scale_local_gradients : bool, optional
        Divide gradients of local variables (`register_local_var` of the optimizer) by the
        number of ranks: they then weigh as much as averaged ones.

    Examples
    --------
    >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))
    >>> model.compile(optimizer, loss="mse")
    >>> model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    """
    settings = checked_settings(
        name=name, device_dense=device_dense, device_sparse=device_sparse, compression=compression,
        sparse_as_dense=sparse_as_dense, gradient_predivide_factor=gradient_predivide_factor, op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients, num_groups=num_groups,
        groups=groups, process_set=process_set, scale_local_gradients=scale_local_gradients,
    )  # fmt: skip
    return wrapped(optimizer, settings)


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = NoneCompressor,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> Any:
    """Like `DistributedOptimizer`, but without the variables of `local_layers`.

    `local_layers` is a layer, or a list of layers, that differ between ranks. Copies of the
    optimizer do not know them.

    >>> optimizer = hvd.PartialDistributedOptimizer(
    ...     keras.optimizers.SGD(0.1), local_layers=model.layers[-1]
    ... )
    """
    if local_layers is None:
        local_layers = ()
    elif isinstance(local_layers, keras.Layer):
        local_layers = (local_layers,)
    for layer in local_layers:
        if not isinstance(layer, keras.Layer):
            raise TypeError(f"local_layers must be Keras layers, not {type(layer).__name__}")
    settings = checked_settings(
        name=name, device_dense=device_dense, device_sparse=device_sparse, compression=compression,
        sparse_as_dense=sparse_as_dense, gradient_predivide_factor=gradient_predivide_factor, op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients, groups=groups,
        process_set=process_set, scale_local_gradients=scale_local_gradients,
    )  # fmt: skip
    return wrapped(optimizer, settings, local_layers)


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = NoneCompressor,
    legacy_opts: bool = False,
) -> Any:
    """Load a Keras model, and make its optimizer distributed; its state is kept.

    Parameters
    ----------
    filepath : str or PathLike
        A .keras file of ``model.save``, with or without hororing. Keras 3 does not load the
        optimizer's state from an .h5 file.
    custom_optimizers : sequence of type, optional
        Classes of optimizers that the file may contain, besides those of Keras.
    custom_objects : dict, optional
        As for ``keras.models.load_model``.
    compression : Compressor, optional
        As for `DistributedOptimizer`. For its other arguments use ``keras.models.load_model``,
        and ``DistributedOptimizer(model.optimizer, ...)`` after it.
    legacy_opts : bool, optional
        Must be False: Keras 3 has no legacy optimizers.

    Examples
    --------
    >>> model.save("last.keras")
    >>> model = hvd.load_model("last.keras")
    """
    if legacy_opts:
        raise ValueError(
            "load_model: legacy_opts=True: Keras 3 has no legacy optimizers; leave it out"
        )
    named = {each.__name__: each for each in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**named, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
