"""DistributedOptimizer for TensorFlow: of Keras, and of tf.compat.v1.train.

hororing.keras handles optimizers of Keras. One of TensorFlow 1 becomes distributed itself: its
class is replaced by a sub-class that reduces the result of `compute_gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hororing._adapters.optimizer_options import Reduction, WithoutWeight
from hororing._requests.arguments import Adasum, Average, check_text
from hororing._requests.compression import Compressor, NoneCompressor
from hororing._requests.process_sets import ProcessSet, global_process_set
from hororing.tensorflow._tensor.tensors import check_devices
from hororing.tensorflow.gradients import (
    checked_key,
    checked_options,
    reduce_gradients,
    step_prefix,
    unique_names,
    variable_key,
)


class _DistributedV1(WithoutWeight, tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    _options: Reduction
    _local: set[Any]  # keys of variables

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return pairs of gradients and variables, the gradients reduced."""
        pairs = super().compute_gradients(*args, **kwargs)
        variables = [variable for _, variable in pairs]
        reduced = reduce_gradients(
            [gradient for gradient, _ in pairs],
            unique_names(step_prefix("gradients", self._options.process_set), variables),
            self._options,
            keys=[variable_key(variable) for variable in variables],
            local=self._local,
        )
        return list(zip(reduced, variables, strict=True))

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of `var` on this rank."""
        self._local.add(checked_key(var, "register_local_var"))


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = NoneCompressor,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make `optimizer` reduce its gradients over all ranks, and return it.

    For an optimizer of Keras, this calls `hororing.tensorflow.keras.DistributedOptimizer`: see
    there for the arguments. One of tf.compat.v1.train reduces in `compute_gradients`; it takes
    neither op=Adasum nor backward_passes_per_step. `use_locking`, `device_dense` and
    `device_sparse` are Horovod's and have no effect.

    Raises
    ------
    ValueError : for other optimizers, and if an option cannot be combined with the optimizer.

    Examples
    --------
    >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    """
    check_devices(device_dense, device_sparse)
    if name is not None:
        check_text("name", name)
    options: dict[str, Any] = {
        "compression": compression, "sparse_as_dense": sparse_as_dense, "op": op,
        "gradient_predivide_factor": gradient_predivide_factor, "num_groups": num_groups,
        "groups": groups, "process_set": process_set,
        "scale_local_gradients": scale_local_gradients,
    }  # fmt: skip
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if backward_passes_per_step != 1 or average_aggregated_gradients:
            raise ValueError(
                "DistributedOptimizer: backward_passes_per_step and average_aggregated_gradients "
                "need an optimizer of Keras (tf.keras.optimizers), not of tf.compat.v1.train"
            )
        if op == Adasum:
            raise ValueError(
                "DistributedOptimizer: op=Adasum needs an optimizer of Keras "
                "(tf.keras.optimizers), not of tf.compat.v1.train"
            )
        if isinstance(optimizer, _DistributedV1):
            raise ValueError("optimizer is distributed already; wrap it once")
        kind = type(optimizer)
        optimizer.__class__ = type(
            f"Distributed{kind.__name__}" if name is None else name,
            (_DistributedV1, kind),
            {"_options": checked_options("DistributedOptimizer", **options), "_local": set()},
        )
        return optimizer
    if not hasattr(optimizer, "apply_gradients"):
        raise ValueError(
            f"DistributedOptimizer takes an optimizer of Keras or of tf.compat.v1.train, not "
            f"{type(optimizer).__name__}; with a loop of your own use DistributedGradientTape"
        )
    import hororing.tensorflow.keras as of_keras  # imports Keras, which not every script uses

    return of_keras.DistributedOptimizer(
        optimizer, name, backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients, **options,
    )  # fmt: skip
