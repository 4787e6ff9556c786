"""ReplicaCheck: whether all ranks train the same parameters, compared once by their digests.

A digest has 64 bits per tensor. It depends on the bits of the elements and on their order, not on
strides or on the device, so that frameworks may compute it where the tensor is. Ranks compare one
number for all tensors. Only if it differs do they exchange names.

Note [When replicas are compared]. All ranks must do so in the same reduction. That is the first one
(or the second, where frameworks broadcast after the first step) since `init`, or since `join`: all
ranks call both, and after both a script has to send the state of one rank to the others. A rank
that has joined contributes the neutral element, so the comparison is an allreduce.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

import hororing.numpy as hvd
from hororing import config
from hororing._engine import state
from hororing._engine.core import ffi, lib
from hororing._requests import arguments, handles
from hororing._requests.objects import allgather_object
from hororing._requests.process_sets import ProcessSet
from hororing.errors import MismatchError

# Number of elements that share one list of factors.
CHUNK: Final = 1 << 17  # so that a chunk stays in a core's cache
# Odd numbers from the golden ratio and from the finaliser of SplitMix64 (Steele et al. 2014,
# doi:10.1145/2660193.2660195).
_STEP, _MIX = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
CHAIN: Final = _STEP - 2**64  # as a signed number, the factor between chunks
_MASK: Final = 2**64 - 1
_SHOWN: Final = 5  # tensors in an error, and ranks


class Digest(NamedTuple):
    """The digest of one tensor."""

    name: str
    kind: str  # data type and shape
    bits: int


@functools.cache
def factors() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the factors of the elements of a chunk: odd numbers without a pattern."""
    mixed = np.arange(1, CHUNK + 1, dtype=np.uint64) * np.uint64(_STEP)
    for shift, factor in zip((30, 27), _MIX, strict=True):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    odd: np.ndarray[Any, np.dtype[np.int64]] = (mixed | np.uint64(1)).astype(np.int64)
    return odd


def digest(array: np.ndarray[Any, Any]) -> int:
    """Return the digest of an array: sums of elements times factors, modulo 2^64.

    Elements of more than 32 bits count as several, others as one signed integer of their size.
    """
    dense = np.ascontiguousarray(array)
    return digest_at(dense.ctypes.data, dense.size, dense.itemsize)


def digest_at(address: int, count: int, item_bytes: int) -> int:
    """Return the digest of so many elements at an address."""
    word_bytes = min(item_bytes, 4)
    words = count * (item_bytes // word_bytes)
    memory = ffi.cast("void *", address)
    return int(lib.hr_digest(memory, words, word_bytes, _factors_at(), CHUNK, CHAIN))


@functools.cache
def _factors_at() -> Any:
    return ffi.from_buffer("int64_t[]", factors())


class _Knob:
    is_on = False


def _read_knob() -> None:
    _Knob.is_on = bool(config.load()["CHECK_PARAMETERS"])


def may_differ(process_set: ProcessSet) -> bool:
    """Whether the set has several ranks, and comparisons are not turned off."""
    return _Knob.is_on and len(process_set.ranks) > 1


state.at_era(_read_knob)


class ReplicaCheck:
    """The comparison of the parameters of one optimizer, or of one tape.

    `what` is the function that the script called, and `remedy` the last sentence of the error. With
    `is_off` set, nothing is compared.
    """

    def __init__(self, what: str, process_set: ProcessSet, remedy: str) -> None:
        self._what, self._remedy = what, remedy
        self._process_set = process_set
        self.is_off = False
        self._name = ""  # of the request
        self._era = 0  # of the latest comparison
        self._handle = 0
        self._digests: list[Digest] = []
        self.same_names = True  # on all ranks, as far as known

    @property
    def is_due(self) -> bool:
        """Whether this rank has to `start` the comparison, in the next reduction."""
        return self._era != state.process.era and not self.is_off

    @property
    def is_started(self) -> bool:
        """Whether `finish` has to wait."""
        return self._handle != 0

    def start(self, name: str, digests: Callable[[], Iterable[Digest]]) -> None:
        """Send the digests of this rank, which have different names. Does not block.

        `name` is that of the request, the same on all ranks.
        """
        self._name = name
        self._era, self._handle, self.same_names = state.process.era, 0, True
        if not may_differ(self._process_set):
            return
        self._digests = sorted(digests())
        listed = "\n".join(f"{each.name}={each.bits}" for each in self._digests)
        whole = hashlib.blake2b(listed.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        number = int.from_bytes(whole, "little", signed=True)
        self._handle = hvd.allreduce_async(
            np.array([number, ~number]),  # the minimum of ~number is ~ the maximum of number
            name=name,
            op=arguments.Min,
            process_set=self._process_set,
        )

    def finish(self) -> None:
        """Wait for the result. MismatchError, on every rank, if parameters differ.

        After a KeyboardInterrupt, another call continues.
        """
        lowest, highest = handles.wait(self._handle).tolist()
        self._handle = 0
        digests, self._digests = self._digests, []
        if lowest == ~highest:
            return
        self._era = 0  # the next reduction compares again
        try:
            found = allgather_object(digests, f"{self._name}.names", self._process_set)
        except MismatchError:  # a rank has joined, and cannot tell
            raise MismatchError(
                f"{self._what}: ranks have different parameters. {self._remedy}"
            ) from None
        by_rank = dict(zip(self._process_set.ranks, found, strict=True))
        self.same_names = len({tuple(each.name for each in mine) for mine in found}) == 1
        raise MismatchError(f"{self._what}: {difference(by_rank)}. {self._remedy}")


def difference(found: dict[int, Sequence[Digest]]) -> str:
    """Return what differs between the digests of some ranks."""
    by_name: dict[str, dict[tuple[str, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, digests in found.items():
        for name, kind, bits in digests:
            by_name[name][kind, bits].append(rank)
    different = []
    for name, values in by_name.items():
        kinds = {kind for kind, _ in values}
        parts = [
            f"{_ranks(ranks)}: {kind if len(kinds) > 1 else f'{bits & _MASK:016x}'}"
            for (kind, bits), ranks in values.items()
        ]
        if lacking := sorted(found.keys() - {each for ranks in values.values() for each in ranks}):
            parts.append(f"{_ranks(lacking)}: none")
        if len(parts) > 1:
            different.append(f"'{name}' ({_some(parts, '; ')})")
    return (
        f"ranks have different values of {len(different)} of {len(by_name)} parameters, by the "
        f"digests of their bits: {_some(different, ', ')}"
    )


def _some(parts: Sequence[str], separator: str) -> str:
    more = [f"{len(parts) - _SHOWN} more"] if len(parts) > _SHOWN else []
    return separator.join([*parts[:_SHOWN], *more])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if ranks[1:] else ''} {_some([str(each) for each in ranks], ',')}"
