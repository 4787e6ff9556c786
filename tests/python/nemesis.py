"""An elastic job to which things happen: ranks are killed, stopped, killed while others recover.

    python tests/python/nemesis.py --minutes 30             with a seed of its own, which it prints
    python tests/python/nemesis.py --minutes 30 --seed 7    the same things again

After each event the job must go on, with as many ranks as before, and no rank may see anything
wrong (nemesis_ranks.py). The exit code is 1 when anything was not so. `make soak` runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import mpirun
from live_job import MARK, PATIENCE_S, poll, processes_marked

from hororing.rendezvous.protocol import process_of

ROOT = Path(__file__).parents[2]
RANKS = Path(__file__).with_name("nemesis_ranks.py")
EVENTS = (
    "kill", "kill two", "kill in recovery", "kill a newcomer", "hold up", "stop",
)  # fmt: skip
PEER_TIMEOUT_S = 2


class ElasticRun:
    """hororun with an elastic job of nemesis_ranks.py; as a context manager it leaves none behind.

    Parameters
    ----------
    size : how many ranks there are, as long as nothing happens.
    flags : more of them, for hororun.
    floats : so many weights.
    hosts : so many pretended hosts with a rank each, instead of this one (hosts.sh).
    """

    def __init__(
        self,
        size: int,
        flags: Sequence[str] = (),
        *,
        floats: int = 1000,
        hosts: int = 0,
        **environment: str,
    ) -> None:
        self.size = size
        self.mark = uuid.uuid4().hex
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self.stop_file, self.out, self._errors = folder / "stop", folder / "out", folder / "errors"
        launcher = [sys.executable, "-m", "hororing.hororun", "-np", str(size)]
        if hosts:
            wrapper = folder / "hororun"
            wrapper.write_text(
                f"#!/bin/bash\nexec {sys.executable} -m hororing.hororun "
                f'--rsh-agent "$PRTE_MCA_plm_ssh_agent" -x PYTHONPATH -x {MARK} "$@"\n'
            )
            wrapper.chmod(0o755)
            launcher = [str(mpirun.HOSTS), ",".join("1" * hosts), str(wrapper)]
        command = [
            *launcher, "--min-np", "1",
            "--blacklist-cooldown-range", "0.05", "0.2", "--output", str(self.out),
            "--peer-timeout-s", str(PEER_TIMEOUT_S), *flags,
            sys.executable, str(RANKS), str(self.stop_file), str(floats),
        ]  # fmt: skip
        with self._errors.open("wb") as errors:
            self.hororun = subprocess.Popen(
                command, stderr=errors, stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT), MARK: self.mark, **environment},
            )  # fmt: skip

    def __enter__(self) -> ElasticRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.hororun.terminate()  # hosts.sh has something to do, too
        try:
            self.hororun.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.hororun.kill()
            self.hororun.wait()
        poll(lambda: not processes_marked(self.mark))
        self._folder.cleanup()

    def worlds(self) -> list[dict[str, Any]]:
        """The generations so far, as hororun has written them."""
        with contextlib.suppress(FileNotFoundError):
            text = (self.out / "membership.jsonl").read_text()
            return [json.loads(line) for line in text.splitlines(keepends=True) if "\n" in line]
        return []

    def lines(self, process: int, word: str) -> list[list[str]]:
        """What a process has printed after this word."""
        for path in self.out.glob(f"process.*{process}/stdout"):
            if int(path.parent.name.partition(".")[2]) == process:
                split = [line.split() for line in path.read_text().splitlines(keepends=True)
                         if line.endswith("\n")]  # fmt: skip
                return [line[1:] for line in split if line and line[0] == word]
        return []

    def processes(self) -> list[int]:
        """The number of the process of each rank, in the last generation."""
        return [process_of(each["uid"]) for each in self.worlds()[-1]["members"]]

    def pids(self) -> list[int]:
        """Of each rank of the last generation."""
        return [int(each["pid"]) for each in self.worlds()[-1]["members"]]

    def pid(self, rank: int) -> int:
        return self.pids()[rank]

    def wait(self, true: Any, what: str) -> Any:
        """Until `true` is so, while hororun lives; what it returns."""
        found = poll(lambda: true() or self.hororun.poll() is not None)
        found = found and true()
        assert found, f"{what}\n{self.told()}"
        return found

    def told(self) -> str:
        """For people: what hororun has said, and the last lines of each process."""
        parts = [f"hororun ({self.hororun.poll()}): {self._errors.read_text()}"]
        for path in sorted(self.out.glob("process.*/std*")):
            lines = path.read_text().splitlines()[-6:]
            parts.append(f"{path.parent.name}/{path.name}: " + "\n    ".join(lines))
        return "\n".join(parts)

    def works(self, size: int, after: int, without: Collection[int]) -> bool:
        worlds = self.worlds()
        if not worlds or worlds[-1]["generation"] <= after:
            return False
        number = str(worlds[-1]["generation"])
        members = worlds[-1]["members"]
        return (
            len(members) == size
            and not any(each["pid"] in without for each in members)
            and all(
                any(line[0] == number for line in self.lines(process_of(each["uid"]), "step"))
                for each in members
            )
        )

    def wait_until_it_works(
        self, size: int | None = None, after: int = 0, without: Collection[int] = ()
    ) -> int:
        """Wait for a generation after that one, of `size` ranks and without some processes.

        All its ranks make steps. Returns its number.
        """
        size = size or self.size
        self.wait(lambda: self.works(size, after, without), f"no generation of {size} works")
        return int(self.worlds()[-1]["generation"])

    def end(self) -> None:
        """All must end well, in the same state, and leave nothing behind."""
        self.stop_file.touch()
        self.wait(lambda: self.hororun.poll() is not None, "it does not end")
        assert self.hororun.returncode == 0, self.told()
        ends = [self.lines(each, "end") for each in self.processes()]
        assert ends == [ends[0]] * self.size, (ends, self.told())
        assert len(ends[0]) == 1, (ends, self.told())
        assert poll(lambda: not processes_marked(self.mark)), "processes are left behind"
        self.check()

    def check(self) -> None:
        """Nothing was wrong so far, and the history is one."""
        for path in self.out.glob("process.*/stdout"):
            assert "WRONG" not in path.read_text(), self.told()
        worlds = self.worlds()
        assert [each["generation"] for each in worlds] == [*range(1, len(worlds) + 1)], worlds
        steps = [each["step"] for each in worlds]
        assert steps == sorted(steps), worlds
        for world in worlds:
            uids = [each["uid"] for each in world["members"]]
            assert len(uids) == len(set(uids)), world


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def disturb(job: ElasticRun, event: str, rng: random.Random) -> None:
    """Do it to a job that works, and wait until it works again."""
    job.wait_until_it_works()
    pids = job.pids()
    one, two = rng.sample(pids, 2)
    hit = {one}
    if event == "hold up":
        kill(one, signal.SIGSTOP)
        time.sleep(PEER_TIMEOUT_S / 4)
        kill(one, signal.SIGCONT)
        # A very busy machine may have held it up for longer: then it is lost.
        before = steps(job)
        job.wait(lambda: steps(job) > before + 50, "it does not go on")
        job.wait_until_it_works()
        return
    kill(one, signal.SIGSTOP if event == "stop" else signal.SIGKILL)
    if event == "kill in recovery":
        time.sleep(rng.choice((0.03, 0.3)) * rng.random())
    if event in ("kill two", "kill in recovery"):
        kill(two)
        hit.add(two)
    elif event == "kill a newcomer":
        newcomer = job.wait(lambda: set(ranks(job)) - set(pids), "nobody has come").pop()
        time.sleep(rng.random())
        kill(newcomer)
        hit.add(newcomer)
    job.wait_until_it_works(without=hit)
    assert not hit & set(ranks(job)), f"{hit} are still there\n{job.told()}"


def steps(job: ElasticRun) -> int:
    """How many steps the job has made, about."""
    return max(int(line[1]) for each in job.processes() for line in job.lines(each, "step"))


def ranks(job: ElasticRun) -> list[int]:
    """Process ids of what runs nemesis_ranks.py in this job."""
    found = []
    for pid in processes_marked(job.mark):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if str(RANKS).encode() in words[:2]:
                found.append(pid)
    return found


def nemesis(size: int, seed: str, end: float, events: Sequence[str] = EVENTS) -> Counter[str]:
    """One job, until `end`. AssertionError where it went wrong. Returns what was done."""
    rng = random.Random(seed)
    done: Counter[str] = Counter()
    environment = {"HORORING_TRANSPORT": "tcp"} if rng.random() < 0.5 else {}
    with ElasticRun(size, **environment) as job:
        job.wait_until_it_works()
        while time.monotonic() < end:
            time.sleep(rng.random() / 2)
            event = rng.choice(events)
            disturb(job, event, rng)
            job.check()
            done[event] += 1
        job.end()
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--ranks", type=int, default=0, help="2 or more; 0: 3 or 4")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    end = time.monotonic() + 60 * options.minutes
    done: Counter[str] = Counter()
    jobs = wrong = 0
    while time.monotonic() < end:
        seed = f"{options.seed}.{jobs}"
        jobs += 1
        try:
            # A new job now and then, since the end is part of it.
            done += nemesis(options.ranks or 3 + jobs % 2, seed, min(end, time.monotonic() + 60))
        except AssertionError as error:
            wrong += 1
            print(f"WRONG, job {seed}: {error}", flush=True)
    print(f"{jobs} jobs, {wrong} of them wrong: {dict(done)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
