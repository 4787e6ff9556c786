"""Which processes of an elastic job cannot take part in its next generation, and why. Pure.

A process that cannot take part must not end those that train. A newcomer with other settings is
refused, and a member whose state the others have found to differ. If two hosts do not reach one
another, one of them is left out for a while.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Final, Protocol

_SHOWN = 200  # characters of a setting in an error text


@dataclass(frozen=True)
class Findings:
    """What a process that is ready knows of itself, and has found out in its last generation.

    Attributes
    ----------
    settings : its own, which all ranks must share: lines "name=value".
    began : its last generation has begun, as far as it knows.
    why : why that has failed; "": it has not, or the reason is known.
    unreachable : ranks that it cannot reach.
    misfits : ranks whose state differs from that of the others, with the difference.
    lost : how many steps its state has gone back by; -1: unknown.
    """

    settings: str = ""
    began: bool = True
    why: str = ""
    unreachable: tuple[int, ...] = ()
    misfits: Mapping[int, str] = field(default_factory=dict)
    lost: int = -1


NOTHING: Final = Findings()


class Candidate(Protocol):
    """A process that could take part."""

    uid: str
    host: str
    order: int  # of arrival
    proven: bool  # it has been in a generation that has begun


def left_out(candidates: Iterable[Candidate], apart: Set[frozenset[str]]) -> set[str]:
    """Choose the processes without which all others reach one another; return their uids.

    Of two hosts that do not reach one another, the newcomer is left out, else the one with the most
    such pairs, with the fewest processes, or the younger one.

    Parameters
    ----------
    apart : pairs of hosts, or of the uids of two processes of one host.
    """
    places: dict[str, list[Candidate]] = {}
    for each in candidates:
        for place in (each.host, each.uid):
            places.setdefault(place, []).append(each)
    out: set[str] = set()
    while pairs := [pair for pair in apart if pair <= places.keys()]:
        broken = Counter(place for pair in pairs for place in pair)

        def worth(place: str, broken: Counter[str] = broken) -> tuple[bool, int, int, int]:
            there = places[place]
            oldest = min(each.order for each in there)
            return any(each.proven for each in there), -broken[place], len(there), -oldest

        for each in places.pop(min(broken, key=worth)):
            out.add(each.uid)
            places.pop(each.uid, None)
    return out


def differences(own: str, theirs: str) -> str:
    """Describe how a process's settings differ from those of the job that it joins."""
    here, there = (
        dict(line.partition("=")[::2] for line in text.splitlines()) for text in (own, theirs)
    )
    named = [
        f"{name}: {_shown(here.get(name))} here, {_shown(there.get(name))} in the job"
        for name in {**there, **here}
        if here.get(name) != there.get(name)
    ]
    return (
        f"this process is configured differently than the job that it joins: {'; '.join(named)}. "
        "Set the same value for it (on every host, in every image), and install the same version"
    )


def _shown(value: str | None) -> str:
    if value is None:
        return "unknown"
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
