"""hororing for TensorFlow 2::

    import hororing.tensorflow as hvd

    hvd.init()
    with tf.GradientTape() as tape:
        loss = loss_of(model(images), labels)
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)

All names and recipes: docs/tensorflow.md.
"""

from __future__ import annotations

from hororing.tensorflow import elastic, mpi_ops, state, util
from hororing.tensorflow.compression import Compression
from hororing.tensorflow.mpi_ops import *  # noqa: F403
from hororing.tensorflow.optimizer import DistributedOptimizer
from hororing.tensorflow.state import *  # noqa: F403
from hororing.tensorflow.sync_batch_norm import SyncBatchNormalization
from hororing.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from hororing.tensorflow.util import *  # noqa: F403
from hororing.tensorflow.util import _executing_eagerly as _executing_eagerly

__all__ = [
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "elastic",
]
__all__ += mpi_ops.__all__
__all__ += state.__all__
__all__ += util.__all__
