"""What makes optimizers of Keras 3 distributed, with Horovod's order of arguments for tf.keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hororing.arguments import Average
from hororing.compression import Compressor, NoneCompressor
from hororing.keras import optimizer as _optimizer
from hororing.keras.compression import Compression
from hororing.keras.optimizer import PartialDistributedOptimizer, load_model
from hororing.process_sets import ProcessSet, global_process_set


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
    """Do as hororing.keras.DistributedOptimizer."""
    return _optimizer.DistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense,
        gradient_predivide_factor, op, num_groups, groups, backward_passes_per_step,
        average_aggregated_gradients, process_set, scale_local_gradients,
    )  # fmt: skip


__all__ = ["Compression", "DistributedOptimizer", "PartialDistributedOptimizer", "load_model"]
