"""DistributedOptimizer with Horovod's order of arguments for tf.keras, of Keras 3 and tf_keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hororing._adapters.optimizer_options import checked_settings
from hororing._requests.arguments import Average
from hororing._requests.compression import Compressor, NoneCompressor
from hororing._requests.process_sets import ProcessSet, global_process_set
from hororing.tensorflow.which_keras import is_legacy

if TYPE_CHECKING or not is_legacy():
    from hororing.keras.compression import Compression
    from hororing.keras.optimizer import PartialDistributedOptimizer, load_model
    from hororing.keras.wrapping import wrapped
else:
    from hororing.tensorflow.compression import Compression
    from hororing.tensorflow.keras._keras2.optimizer import inner_optimizer, load_model, wrapped
    from hororing.tensorflow.tape import weights_of

    def PartialDistributedOptimizer(
        optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any
    ) -> Any:
        """Like `DistributedOptimizer`, without the variables of one layer or a list of layers."""
        several = local_layers if isinstance(local_layers, list | tuple) else [local_layers]
        weights_of(local_layers)  # ValueError for what is no layer
        distributed = DistributedOptimizer(optimizer, *args, **kwargs)
        inner_optimizer(distributed)._state.local_layers = [
            each for each in several if each is not None
        ]
        return distributed


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = NoneCompressor,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make `optimizer` reduce its gradients over all ranks, and return it.

    Arguments are those of hororing.keras.DistributedOptimizer; with tf_keras `op` is not Adasum. As
    there, the optimizer itself becomes distributed, keeps its state, and is saved as a plain one.
    With tf_keras a LossScaleOptimizer may be inside or outside.
    """
    settings = checked_settings(
        name=name, device_dense=device_dense, device_sparse=device_sparse, compression=compression,
        sparse_as_dense=sparse_as_dense, gradient_predivide_factor=gradient_predivide_factor, op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients, num_groups=num_groups,
        groups=groups, process_set=process_set, scale_local_gradients=scale_local_gradients,
    )  # fmt: skip
    return wrapped(optimizer, settings)


__all__ = ["Compression", "DistributedOptimizer", "PartialDistributedOptimizer", "load_model"]
