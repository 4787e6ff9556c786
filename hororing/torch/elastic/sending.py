"""How tensors of a state reach ranks that lack it: from rank 0, or from a rank of their host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hororing._job.rendezvous.generations import Member
from hororing._requests import handles as request_handles
from hororing.torch._tensor.verbs import verbs

# Bounds the bytes in flight, because they are received into extra memory.
_PART_BYTES = 16 << 20


def sources(members: Sequence[Member], lacks: Sequence[bool]) -> list[int] | None:
    """Return the rank from which each rank gets the state; itself, if it has it. None: broadcast.

    A rank that lacks the state gets it from a rank of its host, if possible, and from one that few
    others use. On one host a broadcast is as fast, because all ranks copy at the same time.

    Parameters
    ----------
    members : sequence of Member
        By rank.
    lacks : sequence of bool
        Whether a rank lacks the state, by rank; rank 0 has it.
    """
    if len({each.host for each in members}) == 1:
        return None
    found = list(range(len(members)))
    asked = [0] * len(members)
    for rank in found:
        if lacks[rank]:
            found[rank] = min(
                (each for each in range(len(members)) if not lacks[each]),
                key=lambda each: (members[each].host != members[rank].host, asked[each], each),
            )
            asked[found[rank]] += 1
    return found


class Sender:
    """Sends tensors as determined by `sources`. All ranks make the same calls.

    Parameters
    ----------
    rank : int
        That of this process.
    found : sequence of int
        The result of `sources`.
    """

    def __init__(self, rank: int, found: Sequence[int]) -> None:
        self._splits = [int(each == rank != other) for other, each in enumerate(found)]
        self._lacks = found[rank] != rank

    @torch.no_grad()
    def __call__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Fill these tensors, if the rank lacks the state. Blocks until they are received."""
        part: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, tensor in named:
            if tensor.numel() == 0:
                continue
            part.append((name, tensor))
            size += tensor.nbytes
            if size >= _PART_BYTES:
                self._send(part)
                part, size = [], 0
        self._send(part)

    def _send(self, part: list[tuple[str, torch.Tensor]]) -> None:
        count = sum(self._splits)
        handles = [
            verbs.alltoall_async(tensor.reshape(1, -1).expand(count, -1), self._splits, name)
            for name, tensor in part
        ]
        received = request_handles.wait_all(handles)
        if self._lacks:
            for (_, tensor), (rows, _) in zip(part, received, strict=True):
                tensor.copy_(rows[0].view(tensor.shape))
