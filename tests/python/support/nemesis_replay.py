"""The training of nemesis_ranks.py, and its replay in one process.

    python tests/python/support/nemesis_replay.py DIR/membership.jsonl STEPS

prints the checksum of the weights after STEPS steps. The replay knows only the number of members of
each generation, and the step at which it began. All numbers are integers below 2**53 in float64, so
the order of a sum does not matter, and every bit must be the same.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

SAMPLES, BATCH, FLOATS = 101, 4, 1000
_BELOW = 2.0**40


@dataclass
class Training:
    """The weights and the progress: the complete state of a rank.

    Each step depends on all previous steps, on their order, and on the samples of each.
    """

    floats: int = FLOATS
    step: int = 0
    epoch: int = 0
    position: int = 0  # in the epoch
    weights: Any = None
    used: Any = field(default_factory=lambda: np.zeros(SAMPLES, np.int64))  # count per sample

    def __post_init__(self) -> None:
        if self.weights is None:
            self.weights = np.zeros(self.floats)
        self._factors = np.arange(self.floats, dtype=np.float64) % 7 + 1

    def batch(self, size: int) -> Any:
        """Return the samples of the next step of `size` ranks; each takes every `size`-th one."""
        order = np.random.default_rng(self.epoch).permutation(SAMPLES)
        return order[self.position :][: size * BATCH]

    def gradient(self, samples: Any) -> Any:
        """Return the gradient of these samples. Gradients of several ranks add up."""
        return self._factors * float(samples.sum())

    def apply(self, total: Any, batch: Any) -> None:
        """Make the step whose samples are `batch`."""
        self.weights = np.fmod(5 * self.weights + total, _BELOW)
        self.used[batch] += 1
        self.position += len(batch)
        self.step += 1
        if self.position == SAMPLES:
            self.epoch, self.position = self.epoch + 1, 0

    def crc(self) -> int:
        return zlib.crc32(self.weights.tobytes())


def begins(worlds: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the number of steps before each generation that were kept.

    It is less than at the generation's begin if all members with the last step have died.
    """
    steps = [each["step"] for each in worlds]
    return [min(steps[i:]) for i in range(len(steps))]


def replay(worlds: Sequence[Mapping[str, Any]], steps: int, floats: int = FLOATS) -> Iterator[int]:
    """Yield the checksum after each of `steps` steps, from 0 on; `worlds` is membership.jsonl."""
    training = Training(floats)
    yield training.crc()
    for world, end in zip(worlds, [*begins(worlds)[1:], steps], strict=True):
        while training.step < end:
            batch = training.batch(len(world["members"]))
            training.apply(training.gradient(batch), batch)
            yield training.crc()


if __name__ == "__main__":
    lines = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    print(list(replay(lines, int(sys.argv[2])))[-1])
