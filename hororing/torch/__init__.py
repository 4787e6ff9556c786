"""hororing for PyTorch::

    import hororing.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

All names and recipes: docs/pytorch.md.
"""

from __future__ import annotations

from hororing.errors import (
    DuplicateNameError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    ShutDownError,
    StalledError,
    TransportError,
    UnsupportedOpError,
)
from hororing.torch import elastic, mpi_ops
from hororing.torch.compression import Compression
from hororing.torch.mpi_ops import *  # noqa: F403
from hororing.torch.optimizer import DistributedOptimizer
from hororing.torch.state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hororing.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "DuplicateNameError",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "ShutDownError",
    "StalledError",
    "SyncBatchNorm",
    "TransportError",
    "UnsupportedOpError",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
]
__all__ += mpi_ops.__all__
