"""What a rank did in the last seconds: the differences between two of its samples.

A window holds two steps at least, and two seconds; two seconds alone if no steps are made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

LEAST_NS = 1_900_000_000
MOST_SAMPLES = 60
# A rank makes no steps any more when its present one takes so many times as long as usual.
MOST_STEPS = 5
_SHARED_MEMORY = ("bytes_shm_direct", "bytes_at_once")
_BETWEEN_HOSTS = ("bytes_three_phase", "bytes_ring", "bytes_rank_order")


@dataclass(frozen=True)
class Rates:
    """A rank's window. Times are in s: those ending in _s per step, or per second without steps.

    Shares are of the time.
    """

    seconds: float
    steps: int
    step_s: float | None  # None: no step ended
    waited_s: float
    batch_s: float
    blocked_s: float
    cpu_s: float  # of the main thread on a core
    queued_s: float  # ready to run, but others had the core
    disk_s: float
    throttled_s: float
    queued_share: float
    core_share: float  # of one core, of all threads; may exceed 1
    batches: float  # per second
    tensors: float
    shared_memory: float  # bytes per second of collectives on one host
    between_hosts: float  # of collectives between hosts
    other: float  # of all others, such as on devices
    samples: float | None  # of training, per second, if the script shows their number


@dataclass
class History:
    """The latest samples of a rank."""

    samples: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))

    def add(self, sample: dict[str, Any]) -> None:
        """Add the next one; another process of the rank begins anew."""
        if self.samples and self.samples[-1]["pid"] != sample["pid"]:
            self.samples.clear()
        self.samples.append(sample)

    def rates(self) -> Rates | None:
        """Of the latest window; None after a single sample."""
        if len(self.samples) < 2:
            return None
        past = list(self.samples)[-2::-1]  # the latest first
        last = self.samples[-1]
        short = next((each for each in past if last["at_ns"] - each["at_ns"] >= LEAST_NS), past[-1])
        for each in past:
            steps = last["totals"]["steps"] - each["totals"]["steps"]
            if last["at_ns"] - each["at_ns"] >= LEAST_NS and steps >= 2:
                found = _between(each, last)
                still_s = (last["at_ns"] - last["totals"]["step_began_at_ns"]) / 1e9
                stands = still_s > max(MOST_STEPS * (found.step_s or 0.0), LEAST_NS / 1e9)
                return _between(short, last) if stands else found
        return _between(short, last)


def _between(first: dict[str, Any], last: dict[str, Any]) -> Rates:
    totals = {name: last["totals"][name] - first["totals"][name] for name in last["totals"]}
    kernel = {
        name: last["kernel"][name] - first["kernel"][name]
        for name in last["kernel"]
        if name != "state"
    }
    seconds = max(last["at_ns"] - first["at_ns"], 1) / 1e9
    steps = totals["steps"]
    parts = steps or seconds  # without steps, times are per second
    # Steps have their own clock: a window begins and ends within one.
    if steps and first["totals"]["step_began_at_ns"]:
        step_s = totals["step_began_at_ns"] / 1e9 / steps
    else:
        step_s = seconds / steps if steps else None

    def per_second(names: Sequence[str]) -> float:
        return float(sum(totals[name] for name in names) / seconds)

    shown = [each["shown"].get("values", {}).get("samples") for each in (first, last)]
    since = [each["shown"].get("at_ns", 0) for each in (first, last)]
    samples = None
    if None not in shown:
        samples = (shown[1] - shown[0]) / max(since[1] - since[0], 1) * 1e9
    return Rates(
        seconds=seconds,
        steps=steps,
        step_s=step_s,
        waited_s=totals["waited_ns"] / 1e9 / parts,
        batch_s=totals["batch_ns"] / 1e9 / parts,
        blocked_s=totals["blocked_ns"] / 1e9 / parts,
        cpu_s=kernel["main_cpu_ns"] / 1e9 / parts,
        queued_s=kernel["queued_ns"] / 1e9 / parts,
        disk_s=kernel["disk_ns"] / 1e9 / parts,
        throttled_s=kernel["throttled_ns"] / 1e9 / parts,
        # The kernel counts a wait when it ends: it may have begun before the window.
        queued_share=min(kernel["queued_ns"] / 1e9 / seconds, 1.0),
        core_share=kernel["cpu_ns"] / 1e9 / seconds,
        batches=totals["batches"] / seconds,
        tensors=totals["tensors"] / seconds,
        shared_memory=per_second(_SHARED_MEMORY),
        between_hosts=per_second(_BETWEEN_HOSTS),
        other=per_second(["bytes_other"]),
        samples=samples,
    )


def upper_median(values: Sequence[float]) -> float:
    """The larger of the two in the middle; 0 without values."""
    return sorted(values)[len(values) // 2] if values else 0.0


def lower_median(values: Sequence[float]) -> float:
    """The smaller of the two in the middle; 0 without values."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0
