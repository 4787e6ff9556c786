"""torch.distributed over hororing::

    import torch.distributed as dist

    dist.init_process_group("hororing")

torch finds the backend where hororing is installed; in a source tree, import this module. What it
can do, and what it cannot: docs/torch_distributed.md.
"""

from __future__ import annotations

from hororing.torch.distributed.group import ProcessGroup
from hororing.torch.distributed.rendezvous import create
from hororing.torch.distributed.work import Work
from hororing_torch_backend import register

register()

__all__ = ["ProcessGroup", "Work", "create", "register"]
