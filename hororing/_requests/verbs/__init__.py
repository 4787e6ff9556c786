"""The public verbs, implemented once for every array type.

`Verbs` implements the verbs, one file per collective; an `Adapter` (_requests/adapter.py) knows one
framework's arrays. A framework module makes one `Verbs` and publishes its methods.
"""

from __future__ import annotations

from typing import Any

from hororing._requests import control, handles
from hororing._requests.adapter import T
from hororing._requests.process_sets import ProcessSet, check_member, global_process_set
from hororing._requests.verbs.allgather import Allgather
from hororing._requests.verbs.allreduce import Allreduce
from hororing._requests.verbs.alltoall import Alltoall
from hororing._requests.verbs.broadcast import Broadcast
from hororing._requests.verbs.reducescatter import Reducescatter


class Verbs(Allreduce[T], Broadcast[T], Allgather[T], Alltoall[T], Reducescatter[T]):
    """The verbs over one array type.

    Every verb is collective: all ranks must call it with the same `name` (or make their unnamed
    calls in the same order). Blocking verbs release the GIL. All of them raise: ValueError and
    TypeError if arguments are wrong on this rank alone, for example a process set of which it is
    not a member; MismatchError, on every rank, if ranks disagree (the job continues);
    NotInitializedError before `init`; ShutDownError, PeerLostError, StalledError and TransportError
    when the job ends.
    """


def poll(handle: int) -> bool:
    """Whether `synchronize(handle)` would return at once. ValueError for an unknown handle.

    >>> handle = hvd.allreduce_async(loss, name="loss")
    >>> while not hvd.poll(handle):
    ...     pass  # something else
    >>> mean = hvd.synchronize(handle)
    """
    return handles.poll(handle)


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its result, or raise its error.

    A handle can be synchronized once. ValueError for an unknown or used one.

    >>> handle = hvd.allreduce_async(loss, name="loss")
    >>> mean = hvd.synchronize(handle)
    """
    return handles.wait(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank of the process set has called `barrier`.

    All requests that they have submitted to the set before it are complete when it returns.

    >>> if hvd.local_rank() == 0:
    ...     print("unpacking the data set")
    >>> hvd.barrier()
    """
    control.barrier(check_member(process_set, "barrier"))


def join(device: int = -1) -> int:
    """Block until every rank has called `join`; return the last one to do so.

    For ranks that have run out of data. Until it returns, this rank takes part in the allreduces of
    the others with neutral values: zeros for Sum, Average and Adasum (an Average still divides by
    the number of all ranks), the neutral element for other operations. Meanwhile, on the ranks that
    have not joined, collectives other than allreduce and barrier fail with MismatchError, and so do
    Min, Max and Product with a prescale_factor. Calls of other threads of this rank raise
    ValueError until it returns.

    `device` is the GPU whose memory holds those values, as in Horovod: the one on which this
    process communicates. It may be omitted if hororing has already seen a tensor there, and has no
    effect without a GPU.

    >>> for x, y in loader:  # not equally long on all ranks
    ...     loss = hvd.allreduce((model(x) - y).square().mean(), name="loss")
    >>> last = hvd.join()
    """
    if device != -1:
        context = f" (join: device={device}; leave it out where tensors are on the CPU)"
        handles.use_device(device, context)
    return control.join()
