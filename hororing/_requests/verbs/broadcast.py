"""One rank's tensor, on every rank."""

from __future__ import annotations

from hororing._requests import arguments, handles
from hororing._requests.adapter import T
from hororing._requests.process_sets import ProcessSet, check_member, global_process_set
from hororing._requests.verbs.views import Requests


class Broadcast(Requests[T]):
    """`broadcast` in its forms."""

    def broadcast(
        self,
        tensor: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Return, on every rank, the tensor that rank `root_rank` passes.

        `tensor` has the same shape and data type on every rank. `root_rank` counts among all ranks
        of the job, also within a process set.

        >>> weights = hvd.broadcast(weights, root_rank=0, name="weights")
        """
        result: T = handles.wait(
            self.start_broadcast(
                tensor, root_rank, name, process_set, in_place=False, blocking=True
            )
        )
        return result

    def broadcast_(
        self,
        tensor: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Like `broadcast`, but in place; returns `tensor`.

        >>> hvd.broadcast_(weights, root_rank=0, name="weights")
        """
        result: T = handles.wait(
            self.start_broadcast(tensor, root_rank, name, process_set, in_place=True, blocking=True)
        )
        return result

    def broadcast_async(
        self,
        tensor: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start a `broadcast`; `synchronize(handle)` returns its result.

        >>> handle = hvd.broadcast_async(weights, root_rank=0, name="weights")
        >>> weights = hvd.synchronize(handle)
        """
        return self.start_broadcast(tensor, root_rank, name, process_set, in_place=False)

    def broadcast_async_(
        self,
        tensor: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start a `broadcast_`; `tensor` must not be touched before `synchronize(handle)`.

        >>> handle = hvd.broadcast_async_(weights, root_rank=0, name="weights")
        >>> weights = hvd.synchronize(handle)
        """
        return self.start_broadcast(tensor, root_rank, name, process_set, in_place=True)

    def start_broadcast(
        self,
        tensor: T,
        root_rank: int,
        name: str | None,
        process_set: ProcessSet,
        *,
        in_place: bool,
        blocking: bool = False,
    ) -> int:
        """Start the verbs above; `blocking` is as for `reduce_async`."""
        members = check_member(process_set, "broadcast")
        root_rank = arguments.check_root(root_rank, "broadcast")
        targets = self._checked([tensor], "broadcast", writable=in_place)
        sources = [self.adapter.dense(target) for target in targets]
        outputs = (
            sources
            if in_place or sources[0] is not targets[0]
            else [self.adapter.empty_like(source) for source in sources]
        )
        return self._submit(
            handles.BROADCAST,
            "broadcast",
            name,
            [self._view(*pair) for pair in zip(sources, outputs, strict=True)],
            keep=(sources, outputs),
            finish=lambda _: (self._written(targets, outputs) if in_place else outputs)[0],
            process_set=members,
            root=root_rank,
            blocking=blocking,
        )
