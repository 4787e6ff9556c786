"""How ranks compare their replicas: by one small reduction, and an exchange only if they differ.

    start, finish     the minimum and maximum of one digest of everything, in one allreduce
    rows              the digest of each tensor on each rank, if they differ
    gather            what ranks have to tell: names
    exchange          the bits of a tensor, in pieces

All of them are allreduces, to which a rank that has joined contributes the neutral element. All
ranks call them in the same order, because all of them know the result of the one before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

import hororing.numpy as hvd
from hororing._adapters.replica_check import Digest
from hororing._requests import arguments, handles
from hororing._requests.process_sets import ProcessSet

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_PIECE: Final = 16 << 20  # bytes of a tensor in one allreduce


class Item(NamedTuple):
    """One thing that is equal on all ranks. A number is a tensor without dimensions."""

    of: str  # "parameter", "buffer", "optimizer", "setting"
    name: str
    kind: str  # data type and shape
    bits: int  # its digest

    @classmethod
    def from_digest(cls, of: str, digest: Digest) -> Item:
        """Return that of a tensor."""
        return cls(of, *digest)


class Summary(NamedTuple):
    """What all ranks know after the first reduction."""

    step: int  # the largest of all ranks
    equal: bool
    same_names: bool
    strangers: int  # largest number of parameters that the optimizer does not have


def _number(texts: Sequence[str]) -> int:
    whole = hashlib.blake2b("\n".join(texts).encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(whole.digest(), "little", signed=True)


def start(
    name: str, items: Sequence[Item], step: int, strangers: int, process_set: ProcessSet
) -> int:
    """Send the digest of `items`, which are sorted; return the handle. Does not block."""
    names = _number([f"{each.name}={each.kind}" for each in items])
    bits = _number([f"{each.bits}" for each in items])
    # The minimum of ~number is ~ the maximum of number.
    sent = np.array([bits, ~bits, names, ~names, ~step, ~strangers])
    return hvd.allreduce_async(sent, name=name, op=arguments.Min, process_set=process_set)


def finish(handle: int) -> Summary:
    """Wait for the digests of all ranks."""
    low, high, low_names, high_names, step, strangers = handles.wait(handle).tolist()
    same_names = low_names == ~high_names
    return Summary(~step, low == ~high and same_names, same_names, ~strangers)


def rows(
    name: str, items: Sequence[Item], strangers: int, process_set: ProcessSet
) -> dict[int, list[int]]:
    """Return, of each rank that has not joined, its number of strangers and its digests."""
    ranks = process_set.ranks
    table = np.zeros((len(ranks), len(items) + 2), np.int64)
    table[ranks.index(hvd.rank())] = [1, strangers, *(each.bits for each in items)]
    table = hvd.allreduce(table, name=f"{name}.rows", op=arguments.Sum, process_set=process_set)
    return {rank: row[1:].tolist() for rank, row in zip(ranks, table, strict=True) if row[0]}


def gather(name: str, mine: Any, process_set: ProcessSet) -> dict[int, Any]:
    """Return the plain value that each rank passes, except for those that have joined."""
    ranks = process_set.ranks
    text = np.frombuffer(json.dumps(mine).encode(), np.uint8)
    longest = hvd.allreduce(
        np.array([len(text)]), name=f"{name}.length", op=arguments.Max, process_set=process_set
    )
    table = np.zeros((len(ranks), longest.item()), np.uint8)
    table[ranks.index(hvd.rank()), : len(text)] = text
    table = hvd.allreduce(table, name=f"{name}.texts", op=arguments.Sum, process_set=process_set)
    texts = {rank: row.tobytes().rstrip(b"\0") for rank, row in zip(ranks, table, strict=True)}
    return {rank: json.loads(each) for rank, each in texts.items() if each}


def exchange(name: str, mine: Bytes, roots: Sequence[int], process_set: ProcessSet) -> list[Bytes]:
    """Return the bytes of a tensor on each of `roots`, on all ranks. All have as many bytes."""
    found: list[Bytes] = [np.empty_like(mine) for _ in roots]
    for begin in range(0, len(mine), _PIECE):
        piece = slice(begin, begin + _PIECE)
        sent = np.zeros((len(roots), len(mine[piece])), np.uint8)
        if hvd.rank() in roots:
            sent[roots.index(hvd.rank())] = mine[piece]
        sent = hvd.allreduce(sent, name=f"{name}.bits", op=arguments.Sum, process_set=process_set)
        for each, part in zip(found, sent, strict=True):
            each[piece] = part
    return found


def values(raw: Bytes, kind: str) -> np.ndarray[Any, Any] | None:
    """Return the elements of a tensor of `kind` as numbers; None: of a type without any here."""
    dtype, _, shape = kind.partition("[")
    sizes = [int(each) for each in shape.rstrip("]").split(",") if each.strip()]
    if dtype == "bfloat16":  # the upper half of a float32
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(sizes)
    try:
        return raw.view(dtype).reshape(sizes)
    except TypeError:
        return None
