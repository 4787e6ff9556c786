"""Whether the states of all ranks have the same parts, before any of them is sent.

If a process that has just joined differs, the others go on without it; it raises the error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import hororing.numpy as hvd
from hororing._engine import membership, state
from hororing._engine.shutdown import shutdown
from hororing.errors import MismatchError

_NAMED: Final = 3  # differences in an error text
_BITS: Final = 62
_REMEDY: Final = "Build the same model, optimizer and state in every process"


class MisfitsFound(Exception):
    """Ranks that have just joined have other states: the next generation forms without them.

    Attributes
    ----------
    misfits : dict of int to str
        The differences, by rank.
    """

    def __init__(self, misfits: Mapping[int, str]) -> None:
        super().__init__(misfits)
        self.misfits = misfits


def digest_of(parts: Mapping[str, str]) -> int:
    """Return a hash of the names and forms of a state's parts, below 2**62."""
    text = repr(sorted(parts.items())).encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") % (1 << _BITS)


def check(parts: Mapping[str, str], digests: Sequence[int], settled: Sequence[bool]) -> None:
    """Compare the ranks' states. All ranks call it, with the same `digests` and `settled`.

    Parameters
    ----------
    parts : dict of str to str
        The forms of this rank's parts, by name.
    digests : sequence of int
        `digest_of` each rank's, by rank.
    settled : sequence of bool
        Whether a rank has had the job's state before, by rank.

    Raises
    ------
    MismatchError : this rank has just joined and differs from the others; or, on all ranks, those
        that began together differ.
    MisfitsFound : others have just joined and differ.
    """
    if len(set(digests)) == 1:
        return
    all_parts: list[dict[str, str]] = hvd.allgather_object(dict(parts), name="elastic.parts")
    before = [rank for rank, each in enumerate(settled) if each]
    if len({digests[rank] for rank in before}) != 1:
        raise MismatchError(f"elastic: the states of the ranks differ: {_listed(all_parts)}")
    wanted = digests[before[0]]
    misfits = {
        rank: _differences(all_parts[rank], all_parts[before[0]])
        for rank, digest in enumerate(digests)
        if digest != wanted
    }
    mine = misfits.get(state.rank())
    if mine is not None:
        shutdown()  # as the others do: a generation that ends, not one that fails
        raise MismatchError(f"elastic: {mine}")
    raise MisfitsFound(misfits)


def misfits_of(error: Exception | None) -> dict[int, str]:
    """Return the rank that has just joined a trained job and differs, with the text of `error`.

    {}: there is none, or it is this rank.
    """
    if not (isinstance(error, MismatchError) and error.rank >= 0 and membership.is_elastic()):
        return {}
    *before, world = membership.history()
    uid = world.members[error.rank].uid
    known = any(uid == each.uid for earlier in before for each in earlier.members)
    if known or world.generation == 1 or error.rank == state.rank():
        return {}
    return {error.rank: str(error)}


def _different(all_parts: Sequence[Mapping[str, str]]) -> list[str]:
    names = dict.fromkeys(name for parts in all_parts for name in parts)
    return [name for name in names if len({parts.get(name) for parts in all_parts}) > 1]


def _cut(texts: list[str]) -> str:
    more = f"; and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return f"{'; '.join(texts[:_NAMED])}{more}. {_REMEDY}"


def _differences(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    named = [
        f"'{name}' is {here.get(name, 'missing')} here, {there.get(name, 'missing')} in the job"
        for name in _different([there, here])
    ]
    return f"this process's state differs from that of the job that it joins: {_cut(named)}"


def _listed(all_parts: Sequence[Mapping[str, str]]) -> str:
    texts = []
    for name in _different(all_parts):
        by_form: dict[str, list[int]] = {}
        for rank, parts in enumerate(all_parts):
            by_form.setdefault(parts.get(name, "missing"), []).append(rank)
        forms = (f"{form} on {_ranks(ranks)}" for form, ranks in by_form.items())
        texts.append(f"'{name}' is {', '.join(forms)}")
    return _cut(texts)


def _ranks(ranks: Sequence[Any]) -> str:
    return f"rank{'s' if ranks[1:] else ''} {','.join(map(str, ranks))}"
