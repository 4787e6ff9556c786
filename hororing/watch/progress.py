"""What `hororun --progress` prints: a line a minute, what deserves one, and the end of the job.

A process of its own beside hororun, which tells it the job and its hosts, as it tells the page.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from hororing.watch.hub import Hub
from hororing.watch.page import NONE, obey
from hororing.watch.sampler import PERIOD_S

# A finding is told once it has lasted so long, and told again after so long.
_LASTS_S, _AGAIN_S = 30.0, 600.0
_TOLD = ("late", "slower", "hang")


class Progress:
    """Collects what the states of a job say.

    Parameters
    ----------
    say : callable
        Prints a line.
    every_s : float
        Between two lines about the progress.
    lasts_s : float
        A finding that lasts so long is told.
    """

    def __init__(
        self, say: Callable[[str], object], every_s: float = 60.0, lasts_s: float = _LASTS_S
    ) -> None:
        self._say, self._every_s, self._lasts_s = say, every_s, lasts_s
        self._began = self._said = time.monotonic()
        self._since: dict[tuple[Any, ...], float] = {}  # of findings
        self._told: dict[tuple[Any, ...], float] = {}
        self._first: dict[tuple[int, int], dict[str, Any]] = {}  # by rank and process
        self._last: dict[tuple[int, int], dict[str, Any]] = {}
        self._late_s: dict[int, float] = {}

    def look(self, state: Mapping[str, Any]) -> None:
        """Take a state of the job, once a second; print what is due."""
        now = time.monotonic()
        for rank in state["ranks"]:
            key = rank["rank"], rank["pid"]
            self._first.setdefault(key, {**rank["totals"], "at": now})
            self._last[key] = {**rank["totals"], "at": now}
            late_s = self._late_s.get(rank["rank"], 0.0) + rank["late_s"] * PERIOD_S
            self._late_s[rank["rank"]] = late_s
        self._tell_findings(state, now)
        if now - self._said >= self._every_s and state["ranks"]:
            self._said = now
            self._say(self._line(state))

    def _tell_findings(self, state: Mapping[str, Any], now: float) -> None:
        present = {
            (each["kind"], *each["ranks"]): each["text"]
            for each in state["findings"]
            if each["kind"] in _TOLD
        }
        self._since = {key: self._since.get(key, now) for key in present}
        for key, since in self._since.items():
            lasts = now - since >= self._lasts_s or key[0] == "hang"
            if lasts and now - self._told.get(key, -_AGAIN_S) >= _AGAIN_S:
                self._told[key] = now
                self._say(present[key])

    def _line(self, state: Mapping[str, Any]) -> str:
        step_s = state["step_s"]
        parts = [f"step {self._steps():,}"]
        if step_s:
            waits = [rank["waited_s"] for rank in state["ranks"]]
            waiting = sum(waits) / len(waits) / step_s
            parts += [f"{1 / step_s:.3g} steps/s", f"{min(waiting, 1):.0%} waiting"]
        else:
            parts.append("no steps lately")
        if state["samples_per_s"] is not None:
            parts.append(f"{state['samples_per_s']:.0f} samples/s")
        late = max(state["ranks"], key=lambda rank: rank["late_s"])
        if step_s and late["late_s"] > 0.1 * step_s:
            parts.append(f"rank {late['rank']} late by {late['late_s'] * 1e3:.1f} ms a step")
        return ", ".join(parts)

    def _steps(self) -> int:
        return max((last["steps"] for last in self._last.values()), default=0)

    def end(self) -> None:
        """Print how the job was as a whole, as far as it was seen: to the second."""
        wall_s = time.monotonic() - self._began
        if not self._last:
            self._say(f"the job took {_duration(wall_s)}; no rank was seen, in a look a second")
            return
        waited_s = sum(
            (last["waited_ns"] - self._first[key]["waited_ns"]) / 1e9
            for key, last in self._last.items()
        )
        seen_s = sum(last["at"] - self._first[key]["at"] for key, last in self._last.items())
        parts = [f"the job took {_duration(wall_s)}", f"about {self._steps():,} steps"]
        if seen_s > 0:
            parts.append(f"ranks waited for {min(waited_s / seen_s, 1):.0%} of the time")
        slowest = max(self._late_s, key=lambda rank: self._late_s[rank])
        if self._late_s[slowest] > 0 and len(self._late_s) > 1:
            parts.append(f"mostly for rank {slowest}")
        restarts = len(self._last) - len({rank for rank, _ in self._last})
        parts.append(f"{restarts} restart{'s' * (restarts != 1)}")
        self._say(", ".join(parts))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def main(words: list[str]) -> None:
    """Print until hororun closes the standard input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=float, default=60.0)
    parser.add_argument("--rsh-agent", default="ssh -T --")
    arguments = parser.parse_args(words)
    hub = Hub(NONE, (), shlex.split(arguments.rsh_agent))
    progress = Progress(
        lambda text: print(
            f"hororun: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True
        ),
        arguments.every,
    )
    told = threading.Thread(target=obey, args=(hub,), daemon=True)
    told.start()
    while told.is_alive():
        told.join(PERIOD_S)
        with hub.lock:
            states = [job.state for job in hub.jobs.values() if job.state]
        for state in states:
            progress.look(state)
    progress.end()
    os._exit(0)  # without waiting for samplers


if __name__ == "__main__":
    main(sys.argv[1:])
