"""An elastic job with random faults: ranks are killed, stopped, or killed while others recover.

    python tests/python/support/nemesis.py --minutes 30             a random seed, which it prints
    python tests/python/support/nemesis.py --minutes 30 --seed 7    the same faults again
    python tests/python/support/nemesis.py --torch                  nemesis_torch_ranks.py
    python tests/python/support/nemesis.py --hosts 3                also faults of links and hosts

After each fault the job must go on with as many ranks as before, and no rank may find an error
(nemesis_ranks.py). In the end, every checksum that a rank has printed must be that of the same
training in one process, which knows about the job only what is in membership.jsonl
(nemesis_replay.py). The exit code is 1 if any of this fails. `make soak` runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import mpirun
import nemesis_replay
from live_job import MARK, PATIENCE_S, poll, processes_marked

from hororing._job.rendezvous.protocol import process_of

ROOT = Path(__file__).parents[3]
RANKS = Path(__file__).with_name("nemesis_ranks.py")
TORCH_RANKS = Path(__file__).with_name("nemesis_torch_ranks.py")
EVENTS = (
    "kill", "kill rank 0", "kill two", "kill in recovery", "kill a newcomer", "hold up", "stop",
)  # fmt: skip
HOST_EVENTS = (*EVENTS, "kill agent", "stop agent", "cut", "slow", "part")
PEER_TIMEOUT_S = 2
# Beyond that: to notice that a pair of hosts is apart, and to go on, on a busy machine.
PART_S = 4.0


class ElasticRun:
    """hororun with an elastic job of nemesis_ranks.py. As a context manager it ends all processes.

    Parameters
    ----------
    size : number of ranks.
    flags : more flags for hororun.
    floats : number of weights.
    hosts : number of emulated hosts with one rank each (hosts.sh); 0: this host.
    script : the ranks' script.
    """

    def __init__(
        self,
        size: int,
        flags: Sequence[str] = (),
        *,
        floats: int = 1000,
        hosts: int = 0,
        script: Path = RANKS,
        **environment: str,
    ) -> None:
        self.size, self.floats, self.script = size, floats, script
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
            sys.executable, str(script), str(self.stop_file), str(floats),
        ]  # fmt: skip
        with self._errors.open("wb") as errors:
            self.hororun = subprocess.Popen(
                command, stderr=errors, stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT), MARK: self.mark, **environment},
            )  # fmt: skip

    def __enter__(self) -> ElasticRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.hororun.terminate()  # hosts.sh has to clean up, too
        try:
            self.hororun.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.hororun.kill()
            self.hororun.wait()
        poll(lambda: not processes_marked(self.mark))
        self._folder.cleanup()

    def worlds(self) -> list[dict[str, Any]]:
        """Return the generations so far, as written by hororun."""
        with contextlib.suppress(FileNotFoundError):
            text = (self.out / "membership.jsonl").read_text()
            return [json.loads(line) for line in text.splitlines(keepends=True) if "\n" in line]
        return []

    def lines(self, process: int, word: str) -> list[list[str]]:
        """Return the words after `word` in the lines of a process that begin with it."""
        for path in self.out.glob(f"process.*{process}/stdout"):
            if int(path.parent.name.partition(".")[2]) == process:
                split = [line.split() for line in path.read_text().splitlines(keepends=True)
                         if line.endswith("\n")]  # fmt: skip
                return [line[1:] for line in split if line and line[0] == word]
        return []

    def processes(self) -> list[int]:
        """Return the process number of each rank of the last generation."""
        return [process_of(each["uid"]) for each in self.worlds()[-1]["members"]]

    def pids(self) -> list[int]:
        """Return the process id of each rank of the last generation."""
        return [int(each["pid"]) for each in self.worlds()[-1]["members"]]

    def pid(self, rank: int) -> int:
        return self.pids()[rank]

    def hosts(self) -> dict[str, int]:
        """Return the hosts of the last generation, with the process id of a rank on each."""
        return {each["host"]: int(each["pid"]) for each in self.worlds()[-1]["members"]}

    def wait(self, true: Any, what: str) -> Any:
        """Wait until `true` returns something true, while hororun runs, and return that."""
        found = poll(lambda: true() or self.hororun.poll() is not None)
        found = found and true()
        assert found, f"{what}\n{self.told()}"
        return found

    def told(self) -> str:
        """Return the output of hororun, and the last lines of each process, for failures."""
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
        """Wait for a generation later than `after`, of `size` ranks, without certain processes.

        Returns its number once all its ranks make steps.
        """
        size = size or self.size
        self.wait(lambda: self.works(size, after, without), f"no generation of {size} works")
        return int(self.worlds()[-1]["generation"])

    def end(self) -> None:
        """Stop the job. All ranks must end successfully, in the same state, without leftovers."""
        self.stop_file.touch()
        self.wait(lambda: self.hororun.poll() is not None, "it does not end")
        assert self.hororun.returncode == 0, self.told()
        ends = [self.lines(each, "end") for each in self.processes()]
        assert ends == [ends[0]] * self.size, (ends, self.told())
        assert len(ends[0]) == 1, (ends, self.told())
        assert poll(lambda: not processes_marked(self.mark)), "processes are left behind"
        self.check()
        self.check_replay(int(ends[0][0][0]), int(ends[0][0][3]))

    def check(self) -> None:
        """Fail if a rank has found an error, or the generations do not form one history."""
        for path in self.out.glob("process.*/stdout"):
            assert "WRONG" not in path.read_text(), self.told()
        worlds = self.worlds()
        assert [each["generation"] for each in worlds] == [*range(1, len(worlds) + 1)], worlds
        for world, after in itertools.pairwise(worlds):
            had = {each["uid"]: each["step"] for each in world["members"]}
            have = {each["uid"]: each["step"] for each in after["members"]}
            assert all(had[uid] <= have[uid] for uid in had.keys() & have.keys()), (world, after)
            # All ranks with the last step may have died: then that step is lost.
            assert world["step"] <= after["step"] + 1, (world, after)
        for world in worlds:
            uids = [each["uid"] for each in world["members"]]
            assert len(uids) == len(set(uids)), world

    def check_replay(self, steps: int, crc: int) -> None:
        """Fail unless a replay of the history has the same bits in every step that was kept.

        With nemesis_torch_ranks.py, all ranks must have had the same bits.
        """
        worlds = self.worlds()
        crcs = {steps: crc}
        if self.script == RANKS:
            crcs = dict(enumerate(nemesis_replay.replay(worlds, steps, self.floats)))
            assert crcs[steps] == crc, ("the replay ends differently", steps, self.told())
        began = dict(enumerate(nemesis_replay.begins(worlds), 1))
        members = {each["generation"]: {m["uid"] for m in each["members"]} for each in worlds}
        uids = {process_of(uid): uid for each in members.values() for uid in each}
        for process, uid in uids.items():
            for generation, step, shown in (map(int, line) for line in self.lines(process, "step")):
                if step <= began.get(generation + 1, steps):
                    assert crcs.setdefault(step, shown) == shown, (
                        process,
                        generation,
                        step,
                        self.told(),
                    )
                else:  # the step was lost with the process
                    lost = next(n for n in began if n > generation and worlds[n - 1]["step"] < step)
                    assert uid not in members[lost], (process, generation, step)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def disturb(job: ElasticRun, event: str, rng: random.Random) -> None:
    """Cause a fault in a working job, and wait until it works again."""
    job.wait_until_it_works()
    pids = job.pids()
    one, two = rng.sample(pids, 2)
    if event == "kill rank 0":
        one = pids[0]
    elif event in (
        "kill agent",
        "stop agent",
    ):  # of a host other than hororun's, with all its ranks
        one = rng.choice([pid for host, pid in job.hosts().items() if host != "host0"])
    if event == "part":
        part(job)
        return
    if event in ("hold up", "slow"):
        with held_up(one) if event == "hold up" else slow(one):
            time.sleep(PEER_TIMEOUT_S / 4)
        # On a very busy machine it may have been delayed for longer, and be lost.
        before = steps(job)
        job.wait(lambda: steps(job) > before + 50, "it does not go on")
        job.wait_until_it_works()
        return
    hit = {one}
    if event == "kill agent":
        kill(parent(one))
    elif event == "stop agent":  # which then cannot report the end of its rank
        kill(parent(one), signal.SIGSTOP)
        kill(one)
    elif event == "cut":
        with cut(one):
            # Ranks that are cut off from hororun look for it for a while.
            job.wait(lambda: len(job.worlds()[-1]["members"]) < job.size, "nobody was lost")
            time.sleep(2 * rng.random())
        hit.clear()
    elif event == "stop":
        kill(one, signal.SIGSTOP)
    else:
        kill(one)
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
    assert not hit & set(ranks(job)), f"{hit} still run\n{job.told()}"


def part(job: ElasticRun) -> None:
    """Let hosts 1 and 2 lose one another's packets; the job goes on without one, then with both."""
    hosts = job.hosts()
    began = time.monotonic()
    with parted(hosts["host1"], hosts["host2"]):
        job.wait_until_it_works(job.size - 1, int(job.worlds()[-1]["generation"]))
        took_s = time.monotonic() - began
        assert took_s < PEER_TIMEOUT_S + PART_S, f"it went on after {took_s:.1f} s"
    job.wait_until_it_works()


@contextlib.contextmanager
def parted(one: int, two: int) -> Iterator[None]:
    """Drop the packets between host 1 and host 2, of these two processes, during the block."""
    with network_of(one) as do_one, network_of(two) as do_two:
        ways = (do_one, "10.77.0.3"), (do_two, "10.77.0.2")
        for do, other in ways:
            nowhere = ["lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent"]
            do("ip", "neigh", "replace", other, *nowhere)
        try:
            yield
        finally:
            for do, other in ways:
                do("ip", "neigh", "del", other, "dev", "eth0")


def parent(pid: int) -> int:
    """Return a process's parent; for a rank on another host, that is the agent."""
    return int(re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])


@contextlib.contextmanager
def held_up(pid: int) -> Iterator[None]:
    """Stop a process during the block."""
    kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def cut(pid: int) -> Iterator[None]:
    """Cut the link of this process's host during the block."""
    with network_of(pid) as do:
        do("ip", "link", "set", "eth0", "down")
        try:
            yield
        finally:
            do("ip", "link", "set", "eth0", "up")


@contextlib.contextmanager
def slow(pid: int) -> Iterator[None]:
    """Limit this process's host to sending 2 Mbit/s during the block."""
    with network_of(pid) as do:
        shape = ["root", "tbf", "rate", "2mbit", "burst", "16kb", "latency", "400ms"]
        do("tc", "qdisc", "add", "dev", "eth0", *shape)
        try:
            yield
        finally:
            do("tc", "qdisc", "del", "dev", "eth0", "root")


@contextlib.contextmanager
def network_of(pid: int) -> Iterator[Callable[..., None]]:
    """Yield a function that runs commands in a process's network namespace, even after its end."""
    with open(f"/proc/{pid}/ns/net") as network:
        number = network.fileno()

        def do(*words: str) -> None:
            subprocess.run(
                ["nsenter", f"--net=/proc/self/fd/{number}", *words], check=True, pass_fds=[number]
            )

        yield do


def steps(job: ElasticRun) -> int:
    """Return about how many steps the job has made."""
    return max(int(line[1]) for each in job.processes() for line in job.lines(each, "step"))


def ranks(job: ElasticRun) -> list[int]:
    """Return the process ids of the job's ranks."""
    found = []
    for pid in processes_marked(job.mark):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if str(job.script).encode() in words[:2]:
                found.append(pid)
    return found


def nemesis(size: int, seed: str, end: float, hosts: int = 0, script: Path = RANKS) -> Counter[str]:
    """Run a job until `end`, and return its faults. Raise AssertionError if it behaves wrongly.

    With `hosts`, each rank has its own emulated host.
    """
    rng = random.Random(seed)
    done: Counter[str] = Counter()
    environment = {"HORORING_TRANSPORT": "tcp"} if hosts or rng.random() < 0.5 else {}
    with ElasticRun(size, hosts=hosts, script=script, **environment) as job:
        job.wait_until_it_works()
        while time.monotonic() < end:
            time.sleep(rng.random() / 2)
            event = rng.choice(HOST_EVENTS if hosts else EVENTS)
            disturb(job, event, rng)
            job.check()
            done[event] += 1
        job.end()
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--ranks", type=int, default=0, help="2 or more; 0: 3 or 4")
    parser.add_argument("--hosts", type=int, default=0, help="of one rank each; needs root")
    parser.add_argument("--torch", action="store_true", help="ranks that train with PyTorch")
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
            # A new job every minute, to test the end, too.
            size = options.hosts or options.ranks or 3 + jobs % 2
            script = TORCH_RANKS if options.torch else RANKS
            until = min(end, time.monotonic() + 60)
            done += nemesis(size, seed, until, options.hosts, script)
        except AssertionError as error:
            wrong += 1
            print(f"WRONG, job {seed}: {error}", flush=True)
    print(f"{sum(done.values())} faults in {jobs} jobs, {wrong} of them wrong: {dict(done)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
