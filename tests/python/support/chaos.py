"""Jobs with random faults: ranks are killed, or stopped forever or for a moment; hosts are cut off.

    python tests/python/support/chaos.py --minutes 30            with a random seed, which it prints
    python tests/python/support/chaos.py --minutes 30 --seed 7   the same faults again

Every rank is hit with the same probability, even rank 0. Every survivor must end within the limit
plus 2 s, with an error that names the lost rank. A job that was only delayed must go on. Nothing
may be left behind. `make soak` runs it. The exit code is 1 if any of this fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import mpirun
from live_job import LiveJob, poll

RANKS = Path(__file__).with_name("ending_ranks.py")
LIMIT_S = 3
# The time beyond the limit to notice a fault and to report it. Busy machines take longer.
LATE_S = 2.0
WAYS = {
    "mpirun, shm": {"by": "mpirun", "HORORING_TRANSPORT": "shm"},
    "mpirun, MPI": {"by": "mpirun", "HORORING_TRANSPORT": "mpi"},
    "hororun, shm": {"by": "hororun", "HORORING_TRANSPORT": "shm"},
    "hororun, TCP": {"by": "hororun", "HORORING_TRANSPORT": "tcp"},
}
HOSTS = "two hosts"
EVENTS = ("kill", "stop", "hold up")


def choose(rng: random.Random) -> tuple[str, int, str, int, float]:
    """Return the launcher, the number of ranks, the fault, the rank or host, and the time."""
    way = rng.choice([*WAYS, *([] if mpirun.why_no_hosts() else [HOSTS])])
    if way == HOSTS:
        return way, 3, "cut", rng.randrange(2), rng.random() / 2
    size = rng.choice((2, 3, 4))
    return way, size, rng.choice(EVENTS), rng.randrange(size), rng.random() / 2


def chaos(way: str, size: int, event: str, hit: int, after_s: float) -> None:
    """Run a job with a fault. Raise AssertionError if it behaves wrongly."""
    options: dict[str, str] = {"hosts": "1,2"} if way == HOSTS else dict(WAYS[way])
    grace = ["--grace", str(3 * LIMIT_S)] if options.get("by") == "hororun" else []
    with LiveJob(
        RANKS, size, "reduce_until_it_fails", options=grace, HORORING_TIMEOUT_S=str(LIMIT_S),
        **options,
    ) as job:  # fmt: skip
        job.wait_until_all_say("working")
        time.sleep(after_s)
        begin = time.monotonic()
        if event == "cut":
            network = ["nsenter", "-t", str(job.pid(hit)), "--net"]
            subprocess.run([*network, "ip", "link", "set", "eth0", "down"], check=True)
        else:
            os.kill(job.pid(hit), signal.SIGKILL if event == "kill" else signal.SIGSTOP)
        if event == "hold up":
            time.sleep(LIMIT_S / 3)
            os.kill(job.pid(hit), signal.SIGCONT)
            time.sleep(LIMIT_S / 2)
            assert not any("failed" in job.printed(rank) for rank in range(size)), (
                "the job did not go on"
            )
            return
        survivors = [rank for rank in range(size) if event == "cut" or rank != hit]
        ended = poll(lambda: all(not _runs(job, rank) for rank in survivors), 4 * LIMIT_S)
        took = time.monotonic() - begin
        assert ended, f"survivors still run after {took:.1f} s"
        assert took < LIMIT_S + LATE_S, f"survivors ended after {took:.1f} s"
        for rank in survivors:  # mpirun may have killed it before it printed anything
            for line in job.printed(rank).splitlines():
                if line.startswith("failed"):
                    facts = json.loads(line.removeprefix("failed"))
                    named = re.findall(r"\d+", facts["text"].partition("rank")[2])
                    assert event == "cut" or str(hit) in named, facts
    left = job.files_left(of_mpi=False)
    assert not left, f"left behind: {left}"


def _runs(job: LiveJob, rank: int) -> bool:
    try:
        stat = Path(f"/proc/{job.pid(rank)}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    end = time.monotonic() + 60 * options.minutes
    done: Counter[str] = Counter()
    wrong = 0
    for number in itertools.count():
        if time.monotonic() > end:
            break
        thing = choose(random.Random(f"{options.seed}.{number}"))
        try:
            chaos(*thing)
            done[thing[0]] += 1
        except AssertionError as error:
            wrong += 1
            print(f"WRONG, job {number}, {thing}: {error}", flush=True)
    print(f"{sum(done.values())} jobs as they should be, {wrong} not: {dict(done)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
