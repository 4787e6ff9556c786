"""What a guard has found, as data and as a text; and what it is likely to come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from hororing.guard.comparison import Bytes, Item, values

_SHOWN: Final = 5  # names in a text
ORDER: Final = ("parameter", "buffer", "optimizer", "setting")


@dataclasses.dataclass
class Difference:
    """One tensor, or number, that is not the same on all ranks.

    groups : the ranks that have the same value, the most first.
    """

    of: str
    name: str
    groups: list[list[int]]
    values: list[Any] | None = None  # of numbers, by group

    @property
    def text(self) -> str:
        """The name, with the value of each group of ranks."""
        pairs = zip(self.values or (), self.groups, strict=False)
        shown = ", ".join(f"{value:.6g} on {ranks_text(ranks)}" for value, ranks in pairs)
        return f"{self.name} ({shown})"

    @property
    def majority(self) -> list[int]:
        """The ranks that have the value of more than half of all; none: there is no such value."""
        first = self.groups[0]
        return first if 2 * len(first) > sum(map(len, self.groups)) else []

    @property
    def odd(self) -> list[int]:
        """The ranks that have another value than most: of two equal halves, the second."""
        return sorted(rank for group in self.groups[1:] for rank in group)


@dataclasses.dataclass
class Finding:
    """What a guard has found, the same on all ranks. `str()` of it is what users read.

    Attributes
    ----------
    kind : str
        "divergence".
    step : int
        After how many steps, counted from 0.
    last_equal : int or None
        The latest step after which replicas were equal. None if they never were.
    tensor : str
        The first one by kind: parameters, buffers, state of the optimizer, settings.
    ranks, hosts : list
        Those that have another value of it than more than half of all; empty if no value is that
        of so many.
    differences : list of Difference
        Everything that differs.
    largest : float or None
        The largest difference of `tensor`. None if it has no numbers.
    at : list of int or None
        The index of `largest`.
    repaired : bool or None
        Whether all ranks got the values of most. None if nobody asked for that.
    """

    kind: str
    step: int
    last_equal: int | None = None
    tensor: str = ""
    ranks: list[int] = dataclasses.field(default_factory=list)
    hosts: list[str] = dataclasses.field(default_factory=list)
    differences: list[Difference] = dataclasses.field(default_factory=list)
    compared: int = 0
    largest: float | None = None
    at: list[int] | None = None
    elements: int = 0  # of `tensor` that differ
    equal_state: list[str] = dataclasses.field(default_factory=list)
    causes: list[str] = dataclasses.field(default_factory=list)
    repaired: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        return {**dataclasses.asdict(self), "text": str(self)}

    def __str__(self) -> str:
        since = "never equal" if self.last_equal is None else f"last equal at {self.last_equal}"
        text = f"replicas differ at step {self.step} ({since}): {self._what()}"
        if self.repaired:
            text += ". Repaired: all ranks have the majority's values now"
        elif self.repaired is False:
            text += (
                ". Not repaired: no value is that of more than half of the ranks, or ranks have "
                "different tensors"
            )
        if self.causes:
            text += f". Likely: {'; or '.join(self.causes)}"
        return text

    def _what(self) -> str:
        first = self.differences[0]
        total = sum(map(len, first.groups))
        if first.values is not None:
            text = first.text
        elif first.majority:
            where = ", ".join(
                f"{rank} ({host})" for rank, host in zip(self.ranks, self.hosts, strict=True)
            ) if len(self.ranks) <= _SHOWN else shorten(self.ranks)  # fmt: skip
            several = "s" if self.ranks[1:] else ""
            text = f"{first.name} on rank{several} {where}, {len(self.ranks)} of {total} ranks"
        else:
            text = f"{first.name} has {len(first.groups)} values on {total} ranks: " + "; ".join(
                ranks_text(group) for group in first.groups[:_SHOWN]
            )
        if self.largest is not None:
            text += f"; largest difference {self.largest:.3g} at {self.at}"
        if self.elements:
            text += f"; {self.elements} element{' differs' if self.elements == 1 else 's differ'}"
        if self.equal_state:
            text += f"; equal: its {', '.join(self.equal_state)}"
        settings = [each.text for each in self.differences[1:] if each.values is not None]
        if settings:
            text += f"; {shorten(settings)}"
        if more := [each.name for each in self.differences[1:] if each.values is None]:
            text += f"; {len(more)} more of {self.compared} differ: {shorten(more)}"
        return text


@dataclasses.dataclass
class NonFinite:
    """Gradients that are not finite, in one step, before they were reduced; the same on all ranks.

    Attributes
    ----------
    kind : str
        "nonfinite".
    step : int
        The number of the step, counted from 1.
    tensor : str
        The first parameter, in order of backward, of the first rank that has any.
    ranks, hosts : list
        Those that have any; none if all gradients are finite, but not their sum.
    value : str
        "NaN", "infinite" or "not finite".
    elements, size : int
        How many elements of `tensor` are not finite, and how many it has. 0 if that is not known.
    finite_above : str or None
        The parameter whose gradient was computed before, and is finite; "" if there is none. None
        if the order of backward is not known.
    others : list of str
        The names of further parameters, on any rank.
    skipped : bool
        Whether the step is skipped, on all ranks.
    """

    step: int
    tensor: str
    ranks: list[int]
    hosts: list[str]
    value: str
    elements: int
    size: int
    finite_above: str | None
    others: list[str]
    skipped: bool = False
    kind: str = "nonfinite"

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        return {**dataclasses.asdict(self), "text": str(self)}

    def __str__(self) -> str:
        where = f"on rank {self.ranks[0]} ({self.hosts[0]})" if self.ranks else "only as a sum"
        text = f"gradient of {self.tensor} is {self.value} {where} at step {self.step}"
        if self.size:
            text += f": {self.elements} of {self.size} elements"
        if self.size and self.finite_above is not None:
            text += "; the first in order of backward"
        if self.finite_above:
            text += f"; finite above it: {self.finite_above}"
        if self.others:
            text += f"; not finite either: {shorten(self.others)}"
        if self.ranks[1:]:
            text += f"; {ranks_text(self.ranks[1:])} also"
        return text + ("; the step is skipped on all ranks" if self.skipped else "")


def shorten(parts: Sequence[Any]) -> str:
    """Return the first parts, and how many more there are."""
    more = [f"{len(parts) - _SHOWN} more"] if len(parts) > _SHOWN else []
    return ", ".join([*map(str, parts[:_SHOWN]), *more])


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    return f"rank{'s' if ranks[1:] else ''} {shorten(ranks)}"


def differences(items: Sequence[Item], found: Mapping[int, Sequence[int]]) -> list[Difference]:
    """Return what differs, most important first. `found`: digests by rank, in order of `items`."""
    result = []
    for at, item in enumerate(items):
        groups: dict[int, list[int]] = {}
        for rank, bits in found.items():
            groups.setdefault(bits[at], []).append(rank)
        if len(groups) > 1:
            ordered = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
            result.append(Difference(item.of, item.name, ordered))
    return sorted(result, key=lambda each: ORDER.index(each.of))


def measure(finding: Finding, kind: str, most: Bytes, odd: Bytes) -> bool:
    """Note the largest difference of two tensors. Return whether a single bit differs."""
    flips = int(np.unpackbits(most ^ odd).sum())
    first, second = values(most, kind), values(odd, kind)
    if first is None or second is None:
        return flips == 1
    differ = (most != odd).reshape(first.size, -1).any(axis=1)
    finding.elements = int(differ.sum())
    wide = np.result_type(first.dtype, np.float64)
    with np.errstate(all="ignore"):
        gap = np.abs(first.astype(wide) - second.astype(wide)).reshape(-1)
    gap[differ & ~np.isfinite(gap)] = np.inf  # NaN or infinity on one side
    gap[~differ] = 0
    at = int(gap.argmax()) if gap.size else 0
    finding.largest = float(gap[at])
    finding.at = [int(each) for each in np.unravel_index(at, first.shape)]
    return flips == 1


def causes(
    finding: Finding, replaced: Mapping[str, Sequence[int]], remedy: str, one_bit: bool
) -> list[str]:
    """Return what the difference is likely to come from, the likeliest first.

    `replaced`: the parameters that an optimizer does not train, with ranks. `remedy` sends the
    state of one rank to all.
    """
    found, by_kind = [], {of: [d for d in finding.differences if d.of == of] for of in ORDER}
    for name, ranks in replaced.items():
        found.append(
            f"on {ranks_text(ranks)} the model's {name} is not the tensor that the optimizer "
            "trains: it was replaced after DistributedOptimizer was made; make the optimizer last"
        )
    for each in by_kind["setting"]:
        if each.name == "steps taken":
            found.append(
                "a rank has left out optimizer.step(), or has taken one more: all ranks must decide"
                " alike"
            )
        else:
            found.append(
                f"ranks have different settings: {each.name}; set it to the same on all ranks, "
                f"or call {remedy}"
            )
    if found:
        return found
    parameters = by_kind["parameter"]
    if one_bit and len(finding.differences) == 1:
        host = finding.hosts[0] if finding.hosts else "one of the hosts"
        return [f"one flipped bit: the memory or a processor of {host}"]
    state = [d.name.removeprefix(f"{finding.tensor}: ") for d in by_kind["optimizer"]]
    if (
        len(parameters) == 1
        and len(state) < 3
        and not any(": " in name for name in state)
        and state
    ):
        return [
            f"its {', '.join(state)} was changed on that rank, by a memory error or by the script, "
            "and steps pass it on"
        ]
    if not parameters and by_kind["buffer"]:
        return [
            "the script updates this buffer from the data of one rank: reduce it there "
            f'(hvd.allreduce), or pass ignore=["{by_kind["buffer"][0].name}"] if each rank may '
            "have its own"
        ]
    if not parameters:
        return [f"the optimizer's state was loaded or made on some ranks only: call {remedy}"]
    if finding.last_equal is None:
        return [
            f"the first values were not sent to all ranks: call {remedy}",
            "layers made after that with a seed of each rank",
        ]  # fmt: skip
    if len(parameters) > 1:
        return [
            "load_state_dict or another assignment on some ranks only: load on all, or broadcast "
            "afterwards", "a step with gradients that were not reduced",
        ]  # fmt: skip
    return [
        f"the script assigns to {finding.tensor} on one rank",
        "a memory error of that rank's host",
    ]
