"""How long an elastic job stands still when a rank is killed, and when one comes.

    python benchmarks/elastic.py                       # 4 ranks, 4 MB, 20 kills
    python benchmarks/elastic.py --kills 5 --floats 16000000 -x HORORING_TRANSPORT=tcp

Each step is a sum of all floats and a small sum by which all agree that they have it. Once all make
steps, one rank is killed, at random. From that moment on (the clocks of one host are one):

    error       the last survivor has the exception
    generation  the last survivor has left `init` again
    step        the last survivor has made its first step

Then hororun starts another process. It gets the floats in the generation that it is in first:

    pause       from the last step of the others without it to the first one with it, on all ranks
    grown       from the kill to that step: most is the start of Python
"""

from __future__ import annotations

import math
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record

ROOT = Path(__file__).parents[1]
DEADLINE_S = 60.0
WARM_S = 0.3


def rank(floats: int) -> None:
    """A process of the job. Prints: its pid, a word, the generation, size, seconds."""
    import numpy as np

    import hororing.numpy as hvd
    from hororing import membership
    from hororing.errors import HororingInternalError

    state, step, last = np.zeros(floats, np.float32), 0, 0.0
    gradient = np.ones(floats, np.float32)

    def say(word: str, at: float | None = None) -> None:
        now = time.monotonic() if at is None else at
        print(os.getpid(), word, membership.generation(), hvd.size(), now, flush=True)

    while True:
        hvd.init()
        say("init")
        try:
            steps = hvd.allgather(np.array([step]), name="steps")
            if steps.min() != steps[0]:  # somebody has no state
                state = hvd.broadcast(state, 0, name="state")
            step, first = int(steps[0]), True
            while True:
                total = hvd.allreduce(gradient, op=hvd.Sum, name="gradient")
                told = np.array([1, membership.updates()[1]])
                updated = hvd.allreduce(told, op=hvd.Max, name="agreed")[1]
                state += total
                step += 1
                last = time.monotonic()
                membership.set_progress(step)
                if first:
                    say("step", last)
                    first = False
                if updated:
                    say("left", last)
                    break
        except HororingInternalError:
            say("error")
        hvd.shutdown()


class Job:
    """hororun, and what its processes have printed."""

    def __init__(self, ranks: int, floats: int, variables: list[str]) -> None:
        self.ranks = ranks
        self._told: list[tuple[int, str, int, int, float]] = []
        self._changed = threading.Condition()
        words = [each for name in variables for each in ("-x", name)]
        self._hororun = subprocess.Popen(
            [sys.executable, "-m", "hororing.hororun", "-np", str(ranks), "--min-np", "1",
             "--no-tag-output", "--blacklist-cooldown-range", "0.01", "0.02", *words,
             sys.executable, __file__, "--rank", str(floats)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._hororun.stdout is not None
        for line in self._hororun.stdout:
            pid, word, generation, size, at = line.split()
            with self._changed:
                self._told.append((int(pid), word, int(generation), int(size), float(at)))
                self._changed.notify_all()

    def wait(self, true: Callable[[], Any]) -> Any:
        end = time.monotonic() + DEADLINE_S
        with self._changed:
            while not (found := true()):
                if self._hororun.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the job does not go on: {self._told[-20:]}")
                self._changed.wait(0.5)
        return found

    def when(self, word: str, generation: int, count: int) -> dict[int, float]:
        """When the processes have said it, by pid; none before `count` have."""
        told = {pid: at for pid, what, number, _, at in self._told
                if (what, number) == (word, generation)}  # fmt: skip
        return told if len(told) == count else {}

    def full(self, after: int) -> int:
        """The number of a later generation in which all make steps; 0: there is none yet."""
        numbers = {each[2] for each in self._told if each[2] > after and each[3] == self.ranks}
        return max((n for n in numbers if self.when("step", n, self.ranks)), default=0)

    def end(self) -> None:
        self._hororun.terminate()
        self._hororun.wait()


def one_kill(job: Job, generation: int, rng: random.Random) -> tuple[int, dict[str, float]]:
    """The next full generation, and times in seconds."""
    members = list(job.when("step", generation, job.ranks))
    time.sleep(WARM_S + rng.random() / 10)
    killed = time.monotonic()
    os.kill(rng.choice(members), signal.SIGKILL)
    survivors = job.ranks - 1
    found = {
        "error": job.wait(lambda: job.when("error", generation, survivors)),
        "generation": job.wait(lambda: job.when("init", generation + 1, survivors)),
        "step": job.wait(lambda: job.when("step", generation + 1, survivors)),
    }
    times = {name: max(at.values()) - killed for name, at in found.items()}
    now = job.wait(lambda: job.full(generation + 1))
    began = max(job.when("step", now, job.ranks).values())
    if left := job.when("left", now - 1, survivors):
        times["pause"] = began - max(left.values())
    times["grown"] = began - killed
    return now, times


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--floats", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("-x", action="append", default=[], dest="variables", metavar="NAME=VALUE")
    options = parser.parse_args()
    kills = 2 if options.quick else options.kills
    rng = random.Random(options.seed)
    job = Job(options.ranks, options.floats, options.variables)
    rows: list[record.Row] = []
    series: dict[str, list[float]] = {}
    try:
        generation = job.wait(lambda: job.full(0))
        for _ in range(kills):
            generation, times = one_kill(job, generation, rng)
            for name, seconds in times.items():
                series.setdefault(name, []).append(1e3 * seconds)
    finally:
        job.end()
    for name, found in series.items():
        found.sort()
        high = found[math.ceil(0.95 * len(found)) - 1]
        print(f"{name:<12} median {statistics.median(found):7.1f} ms   p95 {high:7.1f} ms   "
              f"max {found[-1]:7.1f} ms   ({len(found)})")  # fmt: skip
        rows.append({"measure": name, "median_ms": statistics.median(found), "p95_ms": high})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(int(sys.argv[2]))
    else:
        main()
