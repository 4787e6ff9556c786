"""A method of compression with error feedback.

A method reduces one bucket, a flat vector, in a few collectives, and is a generator: it yields the
handle of each and is sent its result. So its first collective starts in the hook of the bucket's
last gradient, and other buckets continue while this one's collective is in flight. The values that
a rank has not sent, its errors, stay in the vector and are added to the gradients of the next step.

Source of error feedback: F. Seide et al., "1-bit stochastic gradient descent and its application to
data-parallel distributed training of speech DNNs", Interspeech 2014; S. P. Karimireddy et al.,
"Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019, arXiv:1901.09847.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any, Final

import torch

from hororing._requests.arguments import Sum
from hororing._requests.compression import StatefulCompression
from hororing._requests.process_sets import ProcessSet, rank_and_size
from hororing.torch._tensor.verbs import verbs

# Elements; smaller tensors are sent uncompressed: their messages would not be shorter.
MIN_ELEMENTS: Final = 1024

Kept = dict[str, torch.Tensor]  # the state of one parameter, by kind
# Yields handles, and is sent the results of `synchronize` for them. Returns the reduced gradients,
# the state to keep for each parameter, and a flag: whether the sum over all ranks is finite.
Steps = Generator[int, Any, tuple[list[torch.Tensor], Sequence[Kept], torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Link:
    """The ranks that reduce a bucket. Starts collectives, whose names begin with `name`."""

    name: str
    process_set: ProcessSet

    @property
    def rank(self) -> int:
        """The number of this rank in the set."""
        return rank_and_size(self.process_set)[0]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.process_set.ranks)

    def sum(self, tensor: torch.Tensor, what: str) -> int:
        """Start to sum `tensor` over the ranks, in place."""
        name = f"{self.name}.{what}"
        return verbs.allreduce_async_(tensor, name=name, op=Sum, process_set=self.process_set)

    def gather(self, tensors: Sequence[torch.Tensor], what: str) -> int:
        """Start to gather the rows of each tensor from all ranks; the result is a tuple."""
        return verbs.grouped_allgather_async(tensors, f"{self.name}.{what}", self.process_set)

    def exchange(self, rows: torch.Tensor, splits: list[int], what: str) -> int:
        """Start to send `splits[r]` rows to rank r; the result is a pair of rows and numbers."""
        return verbs.alltoall_async(rows, splits, f"{self.name}.{what}", self.process_set)

    def broadcast(self, tensor: torch.Tensor, root: int, what: str) -> int:
        """Start to overwrite `tensor` with that of rank `root` of the job."""
        return verbs.broadcast_async_(tensor, root, f"{self.name}.{what}", self.process_set)


@dataclasses.dataclass(frozen=True)
class Piece:
    """What this rank contributes to the sum of a bucket.

    Attributes
    ----------
    flat : torch.Tensor
        The sum of gradients and errors of earlier steps; float32, or float64 for such
        gradients. The method replaces it by the new errors: its sum over all ranks was the
        result, times `divisor`, plus the sum of the errors.
    lengths : sequence of int
        Elements of `flat` for each parameter: a multiple of the method's `multiple`; those
        beyond the elements of the parameter are zero.
    given : sequence of torch.Tensor
        The gradients; results may overwrite them.
    names : sequence of str
        Of the parameters.
    kept : sequence of Kept
        The state that the method keeps for each; may be empty.
    divisor : int
        Of the sum.
    """

    flat: torch.Tensor
    lengths: Sequence[int]
    given: Sequence[torch.Tensor]
    names: Sequence[str]
    kept: Sequence[Kept]
    divisor: int

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of each parameter in a vector like `flat`, in its shape."""
        return parts_of(flat, self.lengths, self.given)


def parts_of(
    flat: torch.Tensor, lengths: Sequence[int], like: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return parts of a vector that have the shapes of `like`."""
    parts = zip(torch.split(flat, list(lengths)), like, strict=True)
    return [part[: each.numel()].view(each.shape) for part, each in parts]


def is_large(param: torch.Tensor) -> bool:
    """Whether this parameter is large enough for compression."""
    return param.is_floating_point() and param.numel() >= MIN_ELEMENTS


class Method(StatefulCompression, ABC):
    """A method of compression: its options. Base of those in `Compression`."""

    multiple: int = 1  # each parameter is padded to a multiple of so many elements

    @property
    def name(self) -> str:
        """Its name, as in `Compression`."""
        return type(self).__name__.lower()

    def compresses(self, param: torch.Tensor) -> bool:
        """Whether gradients of this parameter are compressed; others are sent unchanged."""
        return is_large(param)

    @abstractmethod
    def traffic(self, param: torch.Tensor, ranks: int) -> float:
        """Return the bytes sent for a gradient, relative to an allreduce."""

    @abstractmethod
    def reduce(self, piece: Piece, link: Link) -> Steps:
        """Reduce `piece` over the ranks of `link`. Results have the same bits on every rank."""
