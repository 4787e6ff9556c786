"""The process group: torch.distributed's collectives as requests of the engine.

torch calls the methods by name, from Python or (DDP, functional collectives) from C++.
"""

from __future__ import annotations

from hororing.torch.distributed.exchanges import Exchanges
from hororing.torch.distributed.point_to_point import PointToPoint
from hororing.torch.distributed.reductions import Reductions


class ProcessGroup(Reductions, Exchanges, PointToPoint):
    """A process group of torch.distributed over hororing. `init_process_group` makes it.

    All collectives take tensors of the CPU or of one CUDA device, of the types that
    `hororing.torch` supports; tensors need not be contiguous. Each returns a `Work`. Errors that
    only this rank can detect are raised here, and the other ranks get a MismatchError. `wait`
    raises all others: MismatchError on all ranks if they disagree, after which the group can be
    used again; StalledError after the group's timeout; ShutDownError, PeerLostError and
    TransportError when the job ends.

    Parameters
    ----------
    rank : int
        Of this process among `ranks`.
    ranks : list of int
        Of the job, in the order of the group.
    timeout : datetime.timedelta
        How long a call waits.
    store : Store
        Torch's store, which all members share.
    at_shutdown : callable
        Called when the group is destroyed.
    """
