"""torch.distributed over hororing::

    import torch.distributed as dist

    dist.init_process_group("hororing")

torch finds the backend if hororing is installed; in a source tree, import this module. For its
features and limits see docs/torch_distributed.md.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

# PyTorch 2.6 also loses the Python part of a Work, so DDP would wait forever.
if dist.is_available() and not hasattr(dist.AllreduceOptions, "asyncOp"):
    raise ImportError(
        f'the backend "hororing" needs a later PyTorch than {torch.__version__}, whose '
        "AllreduceOptions has no asyncOp; install torch>=2.8, or use hororing.torch, or gloo"
    )

from hororing.torch.distributed.group import ProcessGroup
from hororing.torch.distributed.rendezvous import create
from hororing.torch.distributed.work import Work
from hororing.torch_backend import register

register()

__all__ = ["ProcessGroup", "Work", "create", "register"]
