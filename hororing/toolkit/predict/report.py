"""From simulated steps to sentences: what each scale gives, why it ends, and what would help."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hororing.toolkit.predict.network import Network
from hororing.toolkit.predict.profile import Array, Profile
from hororing.toolkit.predict.replay import (
    Cost,
    Variant,
    step_times,
    without_bytes,
    without_latency,
)

# Memory and processes of one host, where nothing was recorded within one: as in
# benchmarks/results/simulate.md.
_INNER_ALPHA_S, _INNER_BANDWIDTH = 10e-6, 10e9
_MESSAGE_S = 4e-6
# The share of the bits of full Ethernet frames that is payload of TCP: 1448 of 1538 bytes.
_PAYLOAD = 1448 / 1538
# A further rank that adds less than so much of a rank is not worth its place.
_WORTH = 0.5
_QUANTILES = (0.1, 0.9)
# Less is not told: the simulation is not that exact.
_LEAST_GAIN = 1.02

REMEDIES = {
    "twice the batch per rank": (Variant(compute=2.0), 2.0),
    "int8 gradients (Compression.int8)": (Variant(nbytes=0.25), 1.0),
    "average weights every 8 steps (HierarchicalSGD)": (Variant(period=8), 1.0),
    'groups="auto"': (Variant(grouped=True), 1.0),
}


@dataclass(frozen=True)
class Point:
    """One number of ranks. Times in seconds; low and high: of 80 % of the steps."""

    ranks: int
    step_s: float
    low_s: float
    high_s: float
    efficiency: float  # the time of computing over that of a step
    strong_speedup: float  # of the recorded ranks' batch, divided among these ranks
    lost: dict[str, float]  # stragglers, bandwidth, latency, input: what a step would save


@dataclass(frozen=True)
class Prediction:
    """The result of `predict`. `str()` is the report.

    Attributes
    ----------
    recorded_s, replayed_s : float
        The median step of the recording, and its replay.
    points : list of Point
        By number of ranks.
    limit : str
        What ends the scaling, and where; "" if nothing does.
    remedies : dict
        Name -> gain of samples per second at the largest number of ranks: median, low, high.
    """

    hosts: int
    ranks: int
    steps: int
    network: Network
    compute_s: float
    recorded_s: float
    replayed_s: float
    points: list[Point]
    limit: str
    remedies: dict[str, tuple[float, float, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        net, off = self.network, self.replayed_s / self.recorded_s - 1
        where = "on one host"
        if np.isfinite(net.outer_bandwidth):
            where = (
                f"at {net.outer_bandwidth / _PAYLOAD * 8e-9:g} Gbit/s and "
                f"{net.outer_alpha_s * 1e6:g} us, {net.ranks_per_host} ranks per host"
            )
        lost = [*self.points[0].lost] if self.points else []
        lines = [
            f"recorded: {self.ranks} ranks on {self.hosts} host{'s' * (self.hosts > 1)}, "
            f"{self.steps} steps of {1e3 * self.recorded_s:.1f} ms; their replay takes "
            f"{1e3 * self.replayed_s:.1f} ms ({off:+.0%})" + ", and the rest is added" * (off < 0),
            f"predicted {where}; a step loses:",
            f"ranks  step (ms)    80 % of them  efficiency  {'  '.join(lost)}  strong speed-up",
        ]
        for p in self.points:
            shares = "  ".join(f"{p.lost[name]:>{len(name)}.0%}" for name in lost)
            spread = f"{1e3 * p.low_s:.1f}-{1e3 * p.high_s:.1f}"
            lines.append(
                f"{p.ranks:>5}  {1e3 * p.step_s:>9.1f}  {spread:>14}  {p.efficiency:>10.0%}"
                f"  {shares}  {p.strong_speedup:>15.2f}"
            )
        lines.append(self.limit or f"scales to {self.points[-1].ranks} ranks")
        if self.remedies:
            lines.append(f"at {self.points[-1].ranks} ranks, more samples per second by:")
        for name, (gain, low, high) in self.remedies.items():
            lines.append(f"  {gain:.2f}x ({low:.2f}-{high:.2f})  {name}")
        if self.points and not self.remedies:
            lines.append("no remedy gains 2 %")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures, for JSON."""
        return {
            "recorded": {"ranks": self.ranks, "hosts": self.hosts, "step_s": self.recorded_s},
            "replayed_s": self.replayed_s,
            "compute_s": self.compute_s,
            "network": self.network._asdict(),
            "points": [dict(vars(point)) for point in self.points],
            "limit": self.limit,
            "remedies": self.remedies,
        }


def network_of(
    profile: Profile, bits_per_s: float | None, latency_s: float, ranks_per_host: int | None
) -> Network:
    """The network to predict for; what happens within a host is as recorded.

    Parameters
    ----------
    bits_per_s : float or None
        Between hosts; None: as recorded: all on one host, or hosts of the same network.
    ranks_per_host : int, optional
        None: as in the recording.
    """
    first = profile.hosts.count(profile.hosts[0])
    per_host = ranks_per_host or first
    alpha_s, bandwidth = _INNER_ALPHA_S, _INNER_BANDWIDTH
    fixed, per_byte = fitted(profile.batches)
    hosts = len({*profile.hosts})
    if hosts == 1:
        # The model's two inner messages, and its copies of what k - 1 of k ranks have.
        alpha_s, bandwidth = fixed / 2, 2 * (first - 1) / first / max(per_byte, 1e-15)
        if bits_per_s is None:
            return Network("one host", 1 << 30, alpha_s, bandwidth, 0.0, np.inf, 0.0, "recorded")
    elif bits_per_s is None:
        outer = 2 * (hosts - 1) / hosts / max(per_byte, 1e-15)
        return Network(
            "recorded", per_host, alpha_s, bandwidth, fixed / 2, outer, _MESSAGE_S, "recorded"
        )
    return Network(
        "predicted", per_host, alpha_s, bandwidth, latency_s, bits_per_s / 8 * _PAYLOAD,
        _MESSAGE_S, "recorded within a host, given between hosts",
    )  # fmt: skip


def fitted(batches: Array) -> tuple[float, float]:
    """Seconds of an allreduce: a fixed part, and for each byte; from medians by size."""
    sizes = np.unique(batches[:, 0])
    if not len(sizes):
        return 2 * _INNER_ALPHA_S, 1 / _INNER_BANDWIDTH
    seconds = np.array([np.median(batches[batches[:, 0] == size, 1]) for size in sizes])
    if len(sizes) == 1 or sizes[-1] == 0:
        return 0.0, float(seconds[-1] / max(sizes[-1], 1))
    slope, fixed = np.polyfit(sizes, seconds, 1, w=1 / np.maximum(seconds, 1e-9))
    if slope <= 0 or fixed < 0:
        return 0.0, float(np.median(seconds[sizes > 0] / sizes[sizes > 0]))
    return float(fixed), float(slope)


def predict(
    profile: Profile,
    ranks: Sequence[int],
    *,
    bits_per_s: float | None = None,
    latency_s: float = 0.0,
    ranks_per_host: int | None = None,
    samples_per_s: float | None = None,
    batch: int | None = None,
    seed: int = 0,
) -> Prediction:
    """Predict the steps of a recorded training on other numbers of ranks.

    Parameters
    ----------
    ranks : sequence of int
        Numbers of ranks, ascending; on full hosts.
    bits_per_s, latency_s : float, optional
        Of the network between hosts; None: as recorded. If that was one host, all ranks are on one,
        with a core for each.
    ranks_per_host : int, optional
        Default: as recorded.
    samples_per_s, batch : float and int, optional
        What the source of the data delivers to all ranks together, and the samples of a rank in a
        recorded step; both, or None: input takes part of the recorded time of computing, no more.

    Raises
    ------
    ValueError : numbers that are not full hosts, or out of range.
    """
    if not ranks or min(ranks) < 1 or latency_s < 0 or (bits_per_s is not None and bits_per_s <= 0):
        raise ValueError(f"ranks={ranks}, {bits_per_s} bit/s and {latency_s} s: out of range")
    if ranks_per_host is not None and ranks_per_host < 1:
        raise ValueError(f"ranks_per_host={ranks_per_host} must be at least 1")
    if (samples_per_s is None) != (batch is None) or min(
        (1 if each is None else each) for each in (samples_per_s, batch)
    ) <= 0:
        raise ValueError(
            f"samples_per_s={samples_per_s}, batch={batch}: both, above 0, or neither (how fast "
            "data comes for all ranks, and the samples of a rank in a step)"
        )
    network = network_of(profile, bits_per_s, latency_s, ranks_per_host)
    size = len(profile.hosts)
    compute = float(np.mean(profile.compute_s))
    fixed, per_byte = fitted(profile.batches)
    own: Cost = lambda nbytes: fixed + per_byte * nbytes  # noqa: E731
    here = network_of(profile, None, 0.0, None)
    again = step_times(profile, here, size, seed=seed, cost=own)
    rest_s = max(0.0, float(np.median(profile.step_s) - np.median(again)))
    input_s = batch / samples_per_s if samples_per_s and batch else 0.0
    case = _Case(profile, rest_s, input_s, seed)
    points = [_point(case, network, n, compute) for n in ranks]
    return Prediction(
        hosts=len({*profile.hosts}),
        ranks=size,
        steps=len(profile.step_s),
        network=network,
        compute_s=compute,
        recorded_s=float(np.median(profile.step_s)),
        replayed_s=float(np.median(again)),
        points=points,
        limit=_limit(points, compute),
        remedies=_remedies(case, network, ranks[-1]),
    )


@dataclass(frozen=True)
class _Case:
    """A recording, what its replay lacks in a step, and the input of a rank's batch, in s."""

    profile: Profile
    rest_s: float
    input_s: float
    seed: int

    def steps(self, network: Network, ranks: int, variant: Variant | None = None) -> Array:
        """Seconds of steps; data that comes too slowly for all ranks ends them later."""
        took = step_times(self.profile, network, ranks, variant, seed=self.seed) + self.rest_s
        part = variant.compute if variant else 1.0  # of the batch
        found: Array = np.maximum(took, self.input_s * ranks * part)
        return found


def _point(case: _Case, network: Network, ranks: int, compute: float) -> Point:
    took = case.steps(network, ranks)
    mean = float(np.mean(took))
    others = {
        "stragglers": case.steps(network, ranks, Variant(even=True)),
        "bandwidth": case.steps(without_bytes(network), ranks),
        "latency": case.steps(without_latency(network), ranks),
    }
    if case.input_s:
        others["input"] = replace(case, input_s=0.0).steps(network, ranks)
    divided = Variant(compute=len(case.profile.hosts) / ranks)
    strong = case.steps(network, ranks, divided)
    low, high = np.quantile(took, _QUANTILES)
    return Point(
        ranks, float(np.median(took)), float(low), float(high), compute / mean,
        float(np.mean(case.profile.step_s) / np.mean(strong)),
        {name: max(0.0, 1 - float(np.mean(each)) / mean) for name, each in others.items()},
    )  # fmt: skip


def _limit(points: list[Point], compute: float) -> str:
    for before, after in itertools.pairwise(points):
        added = after.ranks * after.efficiency - before.ranks * before.efficiency
        share = added / max(1, after.ranks - before.ranks)
        if share < _WORTH:
            why = max(after.lost, key=lambda name: after.lost[name])
            return (
                f"stops scaling between {before.ranks} and {after.ranks} ranks, where a further "
                f"rank adds {max(share, 0):.0%} of a rank; mostly because of {why}"
            )
    return ""


def _remedies(case: _Case, network: Network, ranks: int) -> dict[str, tuple[float, float, float]]:
    """The gain of each in samples per second, the largest first; its spread is over steps."""
    now = case.steps(network, ranks)
    found = {}
    for name, (variant, samples) in REMEDIES.items():
        then = case.steps(network, ranks, variant)
        count = len(then) // 8 * 8
        # Means of 8 steps, as local steps have no time of their own.
        gains = samples * _means(now[:count]) / np.maximum(_means(then[:count]), 1e-12)
        low, high = np.quantile(gains, _QUANTILES)
        gain = samples * float(np.mean(now[:count]) / np.mean(then[:count]))
        if gain >= _LEAST_GAIN:
            found[name] = (gain, float(low), float(high))
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def _means(took: Array) -> Array:
    return took.reshape(-1, 8).mean(axis=1)  # type: ignore[no-any-return]
