"""hororing for PyTorch::

    import hororing.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

All names and recipes: docs/pytorch.md.
"""

from __future__ import annotations

import torch

if not hasattr(torch.amp, "GradScaler"):
    raise ImportError(
        f"hororing.torch needs PyTorch 2.3 or later; {torch.__version__} lacks torch.amp.GradScaler"
    )

from hororing._api import exports
from hororing._api.exports import *  # noqa: F403
from hororing.torch import elastic, ops, state
from hororing.torch import mpi_ops as mpi_ops
from hororing.torch._optimizer import trained_alone as trained_alone
from hororing.torch.compression import Compression
from hororing.torch.guard import Guard
from hororing.torch.ops import *  # noqa: F403
from hororing.torch.optimizer import DistributedOptimizer
from hororing.torch.state import *  # noqa: F403
from hororing.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "Guard",
    "SyncBatchNorm",
    "elastic",
]
__all__ += exports.__all__
__all__ += ops.__all__
__all__ += state.__all__
