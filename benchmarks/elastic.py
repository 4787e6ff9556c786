"""How long an elastic job pauses when a rank is killed, frozen, cut off, or added.

    python benchmarks/elastic.py                       # 4 ranks, 4 MB, 20 kills
    python benchmarks/elastic.py --all                 # also the figures below the line
    python benchmarks/elastic.py --kills 5 --floats 16000000 -x HORORING_TRANSPORT=tcp

Each step sums all floats, and then a few numbers, by which the ranks agree that they have the sum.
Once all ranks make steps, a random one is killed. Times from the kill (one host has one clock):

    error       until the last survivor has the exception
    generation  until the last survivor has returned from `init` again
    step        until the last survivor has made its first step

Then hororun starts another process. It receives the floats in its first generation:

    pause       from the survivors' last step without it to the first step of all ranks with it
    grown       from the kill to that step; most of this is the start of Python
    --------------------------------------------------------------------------------------------
    frozen      a rank is stopped: until the survivors' first step, less the detection limit (1 s)
    cut         the same for the link of one of 3 hosts with a rank each (root only)
    torchrun    the same sums over gloo under torchrun: from the kill to the first step of the
                restarted processes, which have no state
    plain, elastic  a step of 2 ranks, in us, of jobs that are not and are elastic; in turns
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record

ROOT = Path(__file__).parents[1]
DEADLINE_S = 60.0
WARM_S = 0.3
LIMIT_S = 1.0  # a process that is silent for longer counts as lost
HOSTS = 3
TIMED_S = 3.0
TORCHRUN_S = 40.0


def rank(floats: int) -> None:
    """Run a process of the job. It prints pid, event, generation, size and time in seconds."""
    import numpy as np

    import hororing.numpy as hvd
    from hororing._engine import membership
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
            if steps.min() != steps[0]:  # a new rank has no state
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


def torchrun_rank(floats: int) -> None:
    """Run a process of torchrun. It prints a line as `rank` does, after the first step."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    gradient, state = torch.ones(floats), torch.zeros(floats)
    small = torch.ones(2)
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    first = True
    while True:
        total = gradient.clone()
        dist.all_reduce(total)
        dist.all_reduce(small.clone(), op=dist.ReduceOp.MAX)
        state += total
        if first:
            line = f"{os.getpid()} step {generation} {dist.get_world_size()} {time.monotonic()}\n"
            os.write(1, line.encode())  # in one write: torchrun starts Python unbuffered
            first = False


def timed_rank(floats: int) -> None:
    """Run a process of a job for TIMED_S; rank 0 prints the median time of a step."""
    import numpy as np

    import hororing.numpy as hvd
    from hororing._engine import membership

    hvd.init()
    state, gradient = np.zeros(floats, np.float32), np.ones(floats, np.float32)
    times, going = [], True
    end = time.monotonic() + TIMED_S
    while going:
        began = time.monotonic()
        total = hvd.allreduce(gradient, op=hvd.Sum, name="gradient")
        told = np.array([time.monotonic() > end, membership.updates()[1]])
        going = not hvd.allreduce(told, op=hvd.Max, name="agreed")[0]
        state += total
        membership.set_progress(len(times))
        times.append(time.monotonic() - began)
    if hvd.rank() == 0:
        print(statistics.median(times[len(times) // 5 :]), flush=True)


def timed(ranks: int, floats: int, more: list[str]) -> float:
    """Return the time of a step in a job with these flags, in seconds."""
    done = subprocess.run(
        [*hororun(ranks, "--no-tag-output", *more),
         sys.executable, __file__, "--timed-rank", str(floats)],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return float(done.stdout)


class Job:
    """A launcher, and the output of its processes.

    Parameters
    ----------
    ranks : number of ranks.
    command : the launcher's command line, without the program of its processes.
    program : this script's flag for its ranks.
    """

    def __init__(
        self, ranks: int, floats: int, command: list[str], program: str = "--rank"
    ) -> None:
        self.ranks = ranks
        self._told: list[tuple[int, str, int, int, float]] = []
        self._changed = threading.Condition()
        python = [sys.executable] if program == "--rank" else []
        self._launcher = subprocess.Popen(
            [*command, *python, __file__, program, str(floats)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True,
            # torchrun's agent keeps gloo's entries in the store across restarts, most of which
            # then fail. With this variable, rank 0 creates a new store each time.
            env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._launcher.stdout is not None
        for line in self._launcher.stdout:
            pid, word, generation, size, at = line.split()
            with self._changed:
                self._told.append((int(pid), word, int(generation), int(size), float(at)))
                self._changed.notify_all()

    def wait(self, true: Callable[[], Any], limit_s: float = DEADLINE_S) -> Any:
        end = time.monotonic() + limit_s
        with self._changed:
            while not (found := true()):
                if self._launcher.poll() is not None or time.monotonic() > end:
                    raise TimeoutError(f"the job makes no progress: {self._told[-20:]}")
                self._changed.wait(0.5)
        return found

    def when(self, word: str, generation: int, count: int) -> dict[int, float]:
        """Return when the processes printed `word`, by pid; {} before `count` of them have."""
        told = {pid: at for pid, what, number, _, at in self._told
                if (what, number) == (word, generation)}  # fmt: skip
        return told if len(told) == count else {}

    def full(self, after: int) -> int:
        """Return a later generation in which all ranks make steps; 0 if there is none yet."""
        numbers = {each[2] for each in self._told if each[2] > after and each[3] == self.ranks}
        return max((n for n in numbers if self.when("step", n, self.ranks)), default=0)

    def end(self) -> None:
        self._launcher.terminate()
        try:
            self._launcher.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:  # torchrun waits for its workers
            self._launcher.kill()
            self._launcher.wait()


def one_kill(job: Job, generation: int, rng: random.Random) -> tuple[int, dict[str, float]]:
    """Kill a random rank. Return the next full generation, and times in seconds."""
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


def one_stop(
    job: Job, generation: int, hit: int, begin: Callable[[], None], end: Callable[[], None]
) -> tuple[int, float]:
    """Call `begin`; return the next full generation, and the others' time to a step, in s."""
    time.sleep(WARM_S)
    began = time.monotonic()
    begin()
    found = job.wait(lambda: job.when("step", generation + 1, job.ranks - 1))
    assert hit not in found
    end()
    return job.wait(lambda: job.full(generation + 1)), max(found.values()) - began


def flags(variables: list[str], *more: str) -> list[str]:
    """Return hororun's flags for an elastic job."""
    words = [each for name in variables for each in ("-x", name)]
    return ["--min-np", "1", "--no-tag-output", "--blacklist-cooldown-range", "0.01", "0.02",
            *words, *more]  # fmt: skip


def hororun(ranks: int, *more: str) -> list[str]:
    """Return hororun's command line for this host."""
    return [sys.executable, "-m", "hororing.hororun", "-np", str(ranks), *more]


def kills(options: Any, rng: random.Random, count: int) -> dict[str, list[float]]:
    """Kill ranks; return times in ms by name."""
    series: dict[str, list[float]] = {}
    job = Job(options.ranks, options.floats, hororun(options.ranks, *flags(options.variables)))
    try:
        generation = job.wait(lambda: job.full(0))
        for _ in range(count):
            generation, times = one_kill(job, generation, rng)
            for name, seconds in times.items():
                series.setdefault(name, []).append(1e3 * seconds)
    finally:
        job.end()
    return series


def frozen(options: Any, rng: random.Random, count: int) -> dict[str, list[float]]:
    """Stop ranks; return the times from the limit to the survivors' next step, in ms."""
    limit = ["--peer-timeout-s", str(LIMIT_S)]
    command = hororun(options.ranks, *flags(options.variables, *limit))
    job = Job(options.ranks, options.floats, command)
    found = []
    try:
        generation = job.wait(lambda: job.full(0))
        for _ in range(count):
            hit = rng.choice(list(job.when("step", generation, job.ranks)))
            generation, seconds = one_stop(
                job, generation, hit, lambda hit=hit: os.kill(hit, signal.SIGSTOP), lambda: None
            )
            found.append(1e3 * (seconds - LIMIT_S))
    finally:
        job.end()
    return {"frozen": found}


def cut(options: Any, rng: random.Random, count: int) -> dict[str, list[float]]:
    """Cut off hosts; return the same times as `frozen`."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Path(folder) / "hororun"
        wrapper.write_text(
            f"#!/bin/bash\nexec {sys.executable} -m hororing.hororun "
            '--rsh-agent "$PRTE_MCA_plm_ssh_agent" -x PYTHONPATH "$@"\n'
        )
        wrapper.chmod(0o755)
        job = Job(
            HOSTS, options.floats,
            [str(ROOT / "tests" / "hosts.sh"), ",".join("1" * HOSTS), str(wrapper),
             *flags(options.variables, "--peer-timeout-s", str(LIMIT_S))],
        )  # fmt: skip
        try:
            generation = job.wait(lambda: job.full(0))
            for _ in range(count):
                pids = list(job.when("step", generation, HOSTS))
                hit = rng.choice([pid for pid in pids if host_of(pid) != "host0"])
                with open(f"/proc/{hit}/ns/net") as network:

                    def link(state: str, number: int = network.fileno()) -> None:
                        subprocess.run(
                            ["nsenter", f"--net=/proc/self/fd/{number}",
                             "ip", "link", "set", "eth0", state], check=True, pass_fds=[number],
                        )  # fmt: skip

                    generation, seconds = one_stop(
                        job, generation, hit, lambda: link("down"), lambda: link("up")
                    )
                found.append(1e3 * (seconds - LIMIT_S))
        finally:
            job.end()
    return {"cut": found}


def host_of(pid: int) -> str:
    """Return the name of the emulated host of a process."""
    return subprocess.run(
        ["nsenter", "-t", str(pid), "--uts", "hostname"], check=True, capture_output=True, text=True
    ).stdout.strip()


def torchrun(options: Any, rng: random.Random, count: int) -> dict[str, list[float]]:
    """Kill a rank of torchrun, once per job; return the times to the next step of all, in ms.

    Jobs that make no progress within TORCHRUN_S are reported and left out.
    """
    found = []
    for _ in range(count):
        job = Job(
            options.ranks, options.floats,
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
             str(options.ranks), "--max-restarts", "2", "--monitor-interval", "0.1"],
            "--torchrun-rank",
        )  # fmt: skip
        try:
            pids = list(job.wait(lambda job=job: job.when("step", 1, job.ranks)))
            time.sleep(WARM_S)
            began = time.monotonic()
            os.kill(rng.choice(pids), signal.SIGKILL)
            again = job.wait(lambda job=job: job.when("step", 2, job.ranks), TORCHRUN_S)
            found.append(1e3 * (max(again.values()) - began))
        except TimeoutError:
            print(f"torchrun made no progress within {TORCHRUN_S:g} s", flush=True)
        finally:
            job.end()
    return {"torchrun": found} if found else {}


def overhead(options: Any, count: int) -> dict[str, list[float]]:
    """Return the times of a step of plain and elastic jobs, which take turns; in us."""
    found: dict[str, list[float]] = {"plain": [], "elastic": []}
    for _ in range(count):
        for name, more in (("plain", []), ("elastic", ["--min-np", "1"])):
            found[name].append(1e6 * timed(2, options.floats, more))
    return found


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--floats", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--all", action="store_true", help="also frozen, cut, torchrun, overhead")
    parser.add_argument("-x", action="append", default=[], dest="variables", metavar="NAME=VALUE")
    options = parser.parse_args()
    count = 2 if options.quick else options.kills
    rng = random.Random(options.seed)
    series = kills(options, rng, count)
    show(series)
    if options.all:
        few = max(count // 3, 2)
        parts = [frozen, torchrun, cut] if os.geteuid() == 0 else [frozen, torchrun]
        for part in parts:
            found = part(options, rng, few)
            show(found)
            series |= found
        found = overhead(options, few)
        show(found)
        series |= found
    if options.json:
        report = {"command": record.command(), "ranks": options.ranks, **record.machine(),
                  "rows": [row(name, found) for name, found in series.items()]}  # fmt: skip
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


def row(name: str, found: list[float]) -> record.Row:
    """Return the row of a series: us for the time of a step, ms for the rest."""
    unit = "us" if name in ("plain", "elastic") else "ms"
    found = sorted(found)
    return {"measure": name, "unit": unit, "median": round(statistics.median(found), 2),
            "p95": round(found[math.ceil(0.95 * len(found)) - 1], 2), "count": len(found),
            "series": [round(each, 2) for each in found]}  # fmt: skip


def show(series: dict[str, list[float]]) -> None:
    """Print a line for each series."""
    for name, found in series.items():
        one = row(name, found)
        print(f"{name:<12} median {one['median']:7.1f} {one['unit']}   p95 {one['p95']:7.1f}   "
              f"max {max(found):7.1f}   ({len(found)})", flush=True)  # fmt: skip


if __name__ == "__main__":
    RANKS = {"--rank": rank, "--torchrun-rank": torchrun_rank, "--timed-rank": timed_rank}
    if sys.argv[1:2] and sys.argv[1] in RANKS:
        RANKS[sys.argv[1]](int(sys.argv[2]))
    else:
        main()
