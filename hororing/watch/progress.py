"""What hororun prints about its job: what deserves a line, the end, with --progress one a minute.

A process of its own beside hororun, which tells it the job and its hosts, as it tells the page.
"""

from __future__ import annotations

import argparse
import math
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

# A finding is told once it has lasted so long. The next one of its kind is told after so long at
# the earliest, then after several times that. A hang has its own warning, by the ranks.
_LASTS_S, _AGAIN_S, _AGAIN_TIMES = 30.0, 600.0, 6
# Not while ranks warm up, and nothing small: others wait for a fifth of the time, or the number of
# steps in a second has fallen by a third.
_WARM_S, _LATE_SHARE, _SLOWER = 60.0, 0.2, 1.5
# Without --progress, jobs that took less say nothing at their end.
_SHORT_S = 60.0


class Progress:
    """Collects what the states of a job say.

    Parameters
    ----------
    say : callable
        Prints a line.
    every_s : float, optional
        Between two lines about the progress. None: no such lines, and none about a short job.
    began : float, optional
        When the job began, by time.monotonic; now by default.
    """

    def __init__(
        self,
        say: Callable[[str], object],
        every_s: float | None = 60.0,
        began: float | None = None,
    ) -> None:
        self._say, self._every_s = say, every_s
        self._began = self._said = time.monotonic() if began is None else began
        self._members: set[tuple[str, int]] = set()
        self._members_since = self._began
        self._processes: set[tuple[str, int]] = set()
        self._most = 0  # ranks at once
        self._since: dict[tuple[Any, ...], float] = {}  # of findings
        self._next: dict[str, tuple[float, float]] = {}  # by kind: when, and the pause after it
        self._first: dict[tuple[int, int], dict[str, Any]] = {}  # by rank and process
        self._last: dict[tuple[int, int], dict[str, Any]] = {}
        self._late_s: dict[int, float] = {}

    def look(self, state: Mapping[str, Any]) -> None:
        """Take a state of the job, once a second; print what is due."""
        now = time.monotonic()
        members = {(rank["sampled_by"], rank["pid"]) for rank in state["ranks"]}
        if members != self._members:
            self._members, self._members_since = members, now
            self._processes |= members
            self._most = max(self._most, len(members))
        for rank in state["ranks"]:
            key = rank["rank"], rank["pid"]
            self._first.setdefault(key, {**rank["totals"], "at": now})
            self._last[key] = {**rank["totals"], "at": now}
            late_s = self._late_s.get(rank["rank"], 0.0) + rank["late_s"] * PERIOD_S
            self._late_s[rank["rank"]] = late_s
        self._tell_findings(state, now)
        every_s = math.inf if self._every_s is None else self._every_s
        if now - self._said >= every_s and state["ranks"]:
            self._said = now
            self._say(self._line(state))

    def _tell_findings(self, state: Mapping[str, Any], now: float) -> None:
        step_s = state["step_s"] or 1.0  # without steps, times are per second
        late = {rank["rank"] for rank in state["ranks"] if rank["late_s"] > _LATE_SHARE * step_s}
        slower = step_s >= _SLOWER * (state["usual_step_s"] or step_s)
        present = {
            (each["kind"], *each["ranks"]): each["text"]
            for each in state["findings"]
            if (each["kind"] == "late" and late & {*each["ranks"]})
            or (each["kind"] == "slower" and slower)
        }
        self._since = {key: self._since.get(key, now) for key in present}
        for key, since in self._since.items():
            due, pause_s = self._next.get(key[0], (now, _AGAIN_S))
            lasts = now - since >= _LASTS_S and now - self._members_since >= _WARM_S
            if lasts and now >= due:
                self._next[key[0]] = now + pause_s, pause_s * _AGAIN_TIMES
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

    def end(self, processes: int = 0) -> None:
        """Print how the job was as a whole, as far as it was seen: to the second.

        `processes`: how many an elastic job has started.
        """
        wall_s = time.monotonic() - self._began
        if self._every_s is None and (wall_s < _SHORT_S or not self._last):
            return
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
        restarts = max(processes, len(self._processes)) - self._most
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
    parser.add_argument("--seldom", dest="every", action="store_const", const=None)
    parser.add_argument("--began-at", type=float)
    parser.add_argument("--rsh-agent", default="ssh -T --")
    arguments = parser.parse_args(words)
    hub = Hub(NONE, (), shlex.split(arguments.rsh_agent))
    progress = Progress(
        lambda text: print(
            f"hororun: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True
        ),
        arguments.every,
        arguments.began_at,
    )
    told = threading.Thread(target=obey, args=(hub,), daemon=True)
    told.start()
    while told.is_alive():
        told.join(PERIOD_S)
        with hub.lock:
            states = [job.state for job in hub.jobs.values() if job.state]
        for state in states:
            progress.look(state)
    progress.end(hub.processes)
    os._exit(0)  # without waiting for samplers


if __name__ == "__main__":
    main(sys.argv[1:])
