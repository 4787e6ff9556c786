"""Which ranks are late, how long the others wait, and what can be done about it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hororing.toolkit.stragglers.arrivals import LEAST_S, Recording, steps
from hororing.toolkit.stragglers.simulator import replay

Array = NDArray[np.float64]

# A rank that is late in a larger share of the steps is slow by itself, not by chance.
PERSISTENT_SHARE = 0.5
# From here on nearly every small group has a straggler in every step.
MANY_SHARE = 0.2
# A rank that is late now and then and costs the others less than this share of the time is no
# straggler.
NOISE_SHARE = 0.01
# So few steps make no prediction.
_MIN_STEPS = 20


@dataclass(frozen=True)
class RankReport:
    """One rank. Times in seconds, of the steps that it took part in."""

    rank: int
    host: str
    steps: int
    late_steps: int
    behind_s: float  # behind the others in those, on average
    waited_s: float  # for others
    waited_for_s: float  # by others, all of them together, in its late steps
    kind: str  # "punctual", "random", "persistent"

    @property
    def late_share(self) -> float:
        """Late steps by steps."""
        return self.late_steps / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of some steps of a job. `str()` is the report."""

    ranks: list[RankReport]
    steps: int
    seconds: float  # from the first step's end to the last one's
    lost_s: float  # by which that would be shorter if the late ranks had been as quick as the rest
    tolerance_s: float
    predicted: dict[str, float]  # speed-up over this run, by how seldom ranks would average

    @property
    def persistent(self) -> list[int]:
        """Ranks that are late in more than half of the steps."""
        return [rank.rank for rank in self.ranks if rank.kind == "persistent"]

    @property
    def random(self) -> list[int]:
        """Ranks that are late now and then."""
        return [rank.rank for rank in self.ranks if rank.kind == "random"]

    @property
    def slow_hosts(self) -> list[str]:
        """Hosts whose ranks are all persistently late, where others are not."""
        everybody = Counter(rank.host for rank in self.ranks)
        late = Counter(rank.host for rank in self.ranks if rank.kind == "persistent")
        return [h for h in everybody if everybody[h] == late[h] and len(everybody) > 1]

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        ranks = [{**vars(rank), "late_share": rank.late_share} for rank in self.ranks]
        lists = {name: getattr(self, name) for name in ("persistent", "random", "slow_hosts")}
        return {**vars(self), "ranks": ranks, **lists}

    def advice(self) -> list[str]:
        """Return advice, a line each."""
        lines = []
        if self.slow_hosts:
            lines.append(
                f"host {', '.join(self.slow_hosts)}: all its ranks are late. See what else runs "
                "there, its clock (heat, power cap), its disk and network."
            )
        if self.persistent:
            lines.append(
                f"persistently late: {_text(self.persistent)}. Averaging less often cannot "
                "help: everybody waits for them in the end. Look for another process, a slow data "
                "loader or longer batches there; give them less data, or leave them out."
            )
        chance = [r for r in self.ranks if r.kind != "persistent"]
        share = sum(r.late_steps for r in chance) / max(1, sum(r.steps for r in chance))
        if self.random and share >= MANY_SHARE:
            lines.append(
                f"late by chance: {_text(self.random)}, in {share:.0%} of their steps. "
                "Every group has a late rank in most steps, so averaging less often gains "
                "little. Look for what they share: file system, data loading, network."
            )
        elif self.random:
            lines.append(
                f"late by chance: {_text(self.random)}. Local or hierarchical SGD averages "
                "less often, so that delays of different ranks overlap (docs/stragglers.md)."
            )
        if not lines:
            lines.append("no stragglers: all ranks arrive together.")
        return lines

    def __str__(self) -> str:
        head = (
            f"{_counted(self.steps, 'step')} of {len(self.ranks)} ranks in {self.seconds:.3f} s; "
            f"{self.lost_s:.3f} s ({self.lost_s / max(self.seconds, 1e-9):.0%}) lost to late ranks"
        )
        table = [
            ("rank", "host", "late steps", "mean delay", "made others wait", "waited itself", ""),
            *(
                (
                    str(rank.rank),
                    rank.host,
                    f"{rank.late_steps} of {rank.steps}",
                    f"{rank.behind_s * 1e3:.1f} ms",
                    f"{rank.waited_for_s:.3f} s",
                    f"{rank.waited_s:.3f} s",
                    rank.kind,
                )
                for rank in self.ranks
            ),
        ]
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines = ["  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in table]
        late = f"late: more than {self.tolerance_s * 1e3:.1f} ms behind half of the ranks"
        guess = [
            f"predicted speed-up of {name}: {factor:.2f}x (these steps, if averaging costs nothing)"
            for name, factor in self.predicted.items()
        ]
        return "\n".join([head, *lines, late, *self.advice(), *guess])


def _text(ranks: list[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def diagnose(recording: Recording, tolerance_s: float | None = None) -> Diagnosis:
    """Compare when the ranks arrive at the collectives of each step.

    A rank arrives at a step when it has submitted its last tensor of it. It is late when it took
    more than `tolerance_s` longer than half of the ranks, without the time in which it waited for
    others, within the step or in another process set. The first step of each rank, whose beginning
    is unknown, does not count.

    Parameters
    ----------
    recording : Recording
        `read_timeline(path)`.
    tolerance_s : float, optional
        None: a tenth of the median step, 1 ms at least.

    Raises
    ------
    ValueError : fewer than two steps, or one rank; a negative tolerance.
    """
    check_tolerance(tolerance_s)
    rows = steps(recording.collectives)
    size = len(recording.hosts)
    ends = [float(np.nanmax(parts[-1])) for parts in rows]
    own, waits = _own_times(rows, size)
    if not np.isfinite(own).any():
        raise ValueError(
            f"{_counted(len(rows), 'step')} of {_counted(size, 'rank')} were recorded; finding "
            "stragglers needs at least two steps of two ranks"
        )
    # Half of the ranks, rounded down, may be late: then this is a punctual rank.
    typical = _lower_median(own)
    behind = own - typical[:, None]
    if tolerance_s is None:
        tolerance_s = max(LEAST_S, 0.1 * float(np.nanmedian(typical)))
    late = behind > tolerance_s
    blame = np.where(late, behind, 0.0)
    blame /= np.maximum(blame.sum(axis=1, keepdims=True), 1e-12)
    waited_for = (blame * waits.sum(axis=1, keepdims=True)).sum(axis=0)
    seconds = ends[-1] - ends[0]
    reports = []
    for rank in range(size):
        count = int(np.count_nonzero(np.isfinite(own[:, rank])))
        late_steps = int(np.count_nonzero(late[:, rank]))
        share = late_steps / max(1, count)
        cost = float(waited_for[rank])
        matters = cost > NOISE_SHARE * seconds
        kind = "random" if late_steps and matters else "punctual"
        if share > PERSISTENT_SHARE:
            kind = "persistent"
        reports.append(
            RankReport(
                rank=rank,
                host=recording.hosts[rank],
                steps=count,
                late_steps=late_steps,
                behind_s=float(behind[late[:, rank], rank].mean()) if late_steps else 0.0,
                waited_s=float(waits[:, rank].sum()),
                waited_for_s=cost,
                kind=kind,
            )
        )
    longest = np.max(np.where(late, behind, 0.0), axis=1)
    return Diagnosis(
        ranks=reports,
        steps=int(np.count_nonzero(np.isfinite(own).any(axis=1))),
        seconds=seconds,
        lost_s=float(longest.sum()),
        tolerance_s=tolerance_s,
        predicted=_predicted(own, recording.hosts),
    )


def check_tolerance(tolerance_s: float | None) -> None:
    """Raise ValueError unless the tolerance is None or a number of seconds."""
    if tolerance_s is not None and (isinstance(tolerance_s, str) or not tolerance_s >= 0):
        raise ValueError(f"the tolerance must be seconds from 0 on, not {tolerance_s!r}")


def _own_times(rows: list[list[Array]], size: int) -> tuple[Array, Array]:
    """Seconds that each rank took for each step, NaN if unknown; that it waited for others."""
    free = np.full(size, np.nan)
    own = np.full((len(rows), size), np.nan)
    waits = np.zeros_like(own)
    for step, parts in enumerate(rows):
        own[step, np.isfinite(parts).any(axis=0)] = 0.0
        for arrivals in parts:
            here, end = np.isfinite(arrivals), np.nanmax(arrivals)
            own[step, here] += np.maximum(arrivals - free, 0.0)[here]  # NaN stays
            waits[step, here] += end - arrivals[here]
            free[here] = end
    return own, np.where(np.isfinite(own), waits, 0.0)


def _lower_median(own: Array) -> Array:
    """Per row, of the values that are not NaN; NaN if there are none."""
    ordered = np.sort(own, axis=1)  # NaN last
    counts = np.isfinite(own).sum(axis=1)
    median: Array = ordered[np.arange(len(own)), np.maximum(0, (counts - 1) // 2)]
    return median


def _predicted(own: Array, hosts: list[str]) -> dict[str, float]:
    """Return the time of the same steps if ranks averaged less often; for steps of all ranks."""
    whole = own[np.isfinite(own).all(axis=1)]
    if len(whole) < _MIN_STEPS or len(whole) < len(own) - 1:
        return {}
    size = len(hosts)
    plans = {"local SGD, period 2": {2: size}, "local SGD, period 8": {8: size}}
    host = hosts.count(hosts[0])
    blocks = all(len({*hosts[i : i + host]}) == 1 for i in range(0, size, host))
    if 1 < host < size and blocks and size % host == 0 and len({*hosts}) == size // host:
        plans["hierarchical SGD, hosts 2, all 8"] = {2: host, 8: size}
    now = replay(whole, {1: size})
    return {name: now / replay(whole, plan) for name, plan in plans.items()}
