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

from hororing._api import exports
from hororing._api.exports import *  # noqa: F403
from hororing.tensorflow import elastic, state, topology, util, verbs
from hororing.tensorflow import mpi_ops as mpi_ops
from hororing.tensorflow.compression import Compression
from hororing.tensorflow.guard import Guard
from hororing.tensorflow.optimizer import DistributedOptimizer
from hororing.tensorflow.state import *  # noqa: F403
from hororing.tensorflow.sync_batch_norm import SyncBatchNormalization
from hororing.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from hororing.tensorflow.topology import *  # noqa: F403
from hororing.tensorflow.util import *  # noqa: F403
from hororing.tensorflow.util import _executing_eagerly as _executing_eagerly
from hororing.tensorflow.verbs import *  # noqa: F403

__all__ = [
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Guard",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "elastic",
]
__all__ += exports.__all__
__all__ += state.__all__
__all__ += topology.__all__
__all__ += util.__all__
__all__ += verbs.__all__
