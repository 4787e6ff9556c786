"""Samples the ranks of this host once a second: what is in their flight recorders, and the kernel.

`python -m hororing.watch.sampler` does so on another host: it prints a line of JSON for each
sample, and ends when its standard input does. A line "stacks 12 34" there asks these processes for
the stacks of their main threads, which come with later samples.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from hororing._engine import recorder
from hororing._engine.recorder import Head
from hororing.watch import kernel, links

PERIOD_S = 1.0
# Samples of other hosts are taken at whole seconds of the clock, and compared so much later, when
# they have come: on a host whose clock is wrong, a finding takes up to a second longer.
ARRIVES_S = 0.2
# New processes, and new sockets of known ones, are looked for this often.
_SEARCH_EVERY_S = 2.0
# A rank whose counters have not moved for so long has its events read, which takes 1 ms.
_STILL_NS = 900_000_000

Sample = dict[str, Any]


@dataclass
class _Rank:
    """A process of this host with a recorder."""

    file: int
    moved: tuple[Any, ...] = ()  # its counters when they last changed
    moved_at_ns: int = 0
    events: int = -1  # of which `pending` is
    pending: list[dict[str, Any]] = field(default_factory=list)
    stacks: int | None = None  # when it was asked for another
    stack: str = ""


class Sampler:
    """Samples the ranks of a job on this host, or of all jobs.

    Parameters
    ----------
    job : str, optional
        Its id; all jobs by default.
    all_users : bool
        For root: other users' processes, too.
    this_host : bool
        Only ranks that know this host by its name. Without it, those of containers here are
        sampled, too.
    """

    def __init__(
        self, job: str | None = None, all_users: bool = False, this_host: bool = False
    ) -> None:
        self.job, self._all_users, self.this_host = job, all_users, this_host
        self._ranks: dict[int, _Rank] = {}
        self._others: set[int] = set()  # processes of other jobs
        self._others_than = job
        self._seen: dict[int, tuple[float, float]] = {}  # since when, and when to look again
        self._owners: dict[int, int] = {}  # by inode of a socket
        self._searched_at = -1e9

    def sample(self) -> Sample:
        """Read everything once; never blocks."""
        if time.monotonic() - self._searched_at >= _SEARCH_EVERY_S:
            self._search()
            self._searched_at = time.monotonic()
        ranks = []
        for pid, rank in list(self._ranks.items()):
            try:
                sample = self._read(pid, rank)
                if sample["rank"] is not None:  # else an elastic job has not taken it in yet
                    ranks.append(sample)
            except (OSError, ValueError):  # it has ended
                self._forget(pid)
        found = []
        with contextlib.suppress(OSError):  # not in this sandbox
            found = links.connections(self._owners)
        name = socket.gethostname()
        for each in found:
            for side in ("own", "other"):
                if str(each[side]).startswith("127."):  # not the loopback of another host
                    each[side] = f"{name} {each[side]}"
        return {"host": name, "at": time.time(), **kernel.host(), "ranks": ranks, "links": found}

    def request_stacks(self, pids: list[int]) -> None:
        """Ask these processes for the stacks of their main threads."""
        for pid in pids:
            rank = self._ranks.get(pid)
            if rank is None:
                continue
            with contextlib.suppress(OSError, ValueError):
                head = recorder.read_head(rank.file)
                rank.stacks = head.stacks
                if not recorder.request_stack(pid, head):
                    rank.stack = "it takes no signal of ours (HORORING_STACK_SIGNAL)"

    def close(self) -> None:
        """Close all files."""
        for pid in list(self._ranks):
            self._forget(pid)

    def _search(self) -> None:
        if self.job != self._others_than:
            self._others, self._seen, self._others_than = set(), {}, self.job
        alive = {int(each) for each in os.listdir("/proc") if each.isdecimal()}
        now = time.monotonic()
        self._others &= alive
        self._seen = {pid: self._seen.get(pid, (now, now)) for pid in alive}
        # Most ranks call `init` soon after their start: old processes are looked at less often.
        later = {pid for pid, (_, next_look) in self._seen.items() if next_look > now}
        self._seen |= {
            pid: (t, 2 * now - t) for pid, (t, _) in self._seen.items() if pid not in later
        }
        known = {*self._ranks, *self._others, *later}
        for pid, path, head in recorder.processes(self._all_users, known):
            here = not self.this_host or head.facts["host"] == socket.gethostname()
            if not here or self.job not in (None, head.facts["job"]):
                self._others.add(pid)
                continue
            with contextlib.suppress(OSError):  # it has ended
                self._ranks[pid] = _Rank(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        self._owners = {}
        for pid in list(self._ranks):
            with contextlib.suppress(OSError):
                self._owners.update(dict.fromkeys(links.sockets(pid), pid))

    def _read(self, pid: int, rank: _Rank) -> dict[str, Any]:
        head = recorder.read_head(rank.file)
        figures = kernel.process(pid)
        if figures["state"] in ("Z", "X"):
            raise ValueError("it has ended")
        now = time.monotonic_ns()
        moved = (head.events, head.totals["batches"])
        if moved != rank.moved:
            rank.moved, rank.moved_at_ns = moved, now
            rank.stack = ""
        still_ns = now - rank.moved_at_ns
        if still_ns < _STILL_NS:
            rank.pending = []
        elif rank.events != head.events:
            rank.pending = self._pending(pid)
            rank.events = head.events
        if rank.stacks is not None and head.stacks != rank.stacks:
            rank.stacks = None
            rank.stack = self._recording(pid).stack
        facts = head.facts
        return {
            "pid": pid,
            **{name: facts[name] for name in ("rank", "size", "job", "command")},
            "host": facts["host"],
            "sampled_by": socket.gethostname(),
            "at_ns": now,
            "totals": head.totals,
            "shown": head.shown,
            "still_ns": still_ns,
            "pending": [{**each, "for_ns": now - each["since_ns"]} for each in rank.pending],
            "last": self._last(rank.file, head),
            "kernel": figures,
            "stack": rank.stack,
        }

    def _recording(self, pid: int) -> recorder.Recording:
        return recorder.read(f"/proc/self/fd/{self._ranks[pid].file}")

    def _pending(self, pid: int) -> list[dict[str, Any]]:
        recording = self._recording(pid)
        offset = recording.facts["wall_minus_monotonic_ns"]
        return [
            {
                "request": each.request,
                "kind": each.kind,
                "since_ns": round(each.time * 1e9) - offset,
            }
            for each in recording.unfinished()
        ]

    def _last(self, file: int, head: Head) -> str:
        event = recorder.last_event(file, head)
        return "" if event is None else f"{event.kind} {event.request}"

    def _forget(self, pid: int) -> None:
        os.close(self._ranks.pop(pid).file)


def until_next(after_s: float = 0.0) -> float:
    """Seconds until the next sample is due; not again at once, if a wait was a little short."""
    left = PERIOD_S - (time.time() - after_s) % PERIOD_S
    return left if left > PERIOD_S / 10 else left + PERIOD_S


def main() -> None:
    """Print samples until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job")
    parser.add_argument("--this-host", action="store_true")
    arguments = parser.parse_args()
    sampler = Sampler(arguments.job, this_host=arguments.this_host)
    while True:
        print(json.dumps(sampler.sample()), flush=True)
        following = time.monotonic() + until_next()
        while (left := following - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left)[0]:
                words = os.read(0, 4096).decode().split()
                if not words:
                    return
                sampler.request_stacks([int(word) for word in words if word.isdecimal()])


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        main()
