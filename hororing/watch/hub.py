"""Collects the samples of all hosts of a job, once a second, on a thread of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hororing.watch.job import Job
from hororing.watch.sampler import ARRIVES_S, Sample, Sampler, until_next

_SAMPLER = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
    "from hororing.watch.sampler import main; main()"
)
_MOST_BYTES = 2**24  # of a sample
# A job without ranks is kept for so long, so that its end can be seen.
_KEPT_S = 600.0
_TRY_AGAIN_S = 10.0


class RemoteSampler:
    """The sampler on another host, started through ssh or the like; started again if it ends."""

    def __init__(self, name: str, rsh: Sequence[str], job: str | None) -> None:
        self.name = name
        self.problem = ""  # why there are no samples
        self._latest: deque[Sample] = deque(maxlen=1)
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        words = [sys.executable, "-c", _SAMPLER, "--this-host", *(["--job", job] if job else [])]
        self._command = [*rsh, name, shlex.join(words)]
        threading.Thread(target=self._run, daemon=True, name=f"samples of {name}").start()

    def take(self) -> Sample | None:
        """The latest sample, if there is a new one."""
        with contextlib.suppress(IndexError):
            return self._latest.popleft()
        return None

    def request_stacks(self, pids: Sequence[int]) -> None:
        """Like `Sampler.request_stacks`."""
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                process.stdin.write(f"stacks {' '.join(map(str, pids))}\n".encode())
                process.stdin.flush()

    def close(self) -> None:
        """End it."""
        self._ended.set()
        process = self._process
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._serve()
            except OSError as error:
                self.problem = f"{self._command[0]}: {error.strerror}"
            self._ended.wait(_TRY_AGAIN_S)

    def _serve(self) -> None:
        pipe = subprocess.PIPE
        with subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        ) as process:
            self._process = process
            assert process.stdout is not None
            assert process.stderr is not None
            for line in iter(lambda: process.stdout.readline(_MOST_BYTES), b""):  # type: ignore[union-attr]
                with contextlib.suppress(ValueError):  # a login script may print lines
                    sample = json.loads(line)
                    if isinstance(sample, dict) and "ranks" in sample:
                        self._latest.append(sample)
                        self.problem = ""
                if self._ended.is_set():
                    process.kill()
            said = process.stderr.read(2000).decode("utf-8", "replace").strip()
            self.problem = said.splitlines()[-1] if said else "its sampler has ended"
        self._process = None


class Hub:
    """The jobs that the samplers see.

    Parameters
    ----------
    job : str, optional
        Its id; all jobs by default.
    hosts : Sequence of str
        Other hosts to sample.
    rsh : Sequence of str
        The words before a host's name in a command that runs another one there.
    all_users : bool
        For root: other users' processes here, too.
    """

    def __init__(
        self,
        job: str | None = None,
        hosts: Sequence[str] = (),
        rsh: Sequence[str] = ("ssh", "-T", "--"),
        all_users: bool = False,
    ) -> None:
        self.lock = threading.Lock()  # guards `jobs` and what is in them
        self.jobs: dict[str, Job] = {}
        self.processes = 0  # that an elastic job has started, as its launcher tells
        self.cost_s = 0.0  # processor time of the last sample and its comparison
        self._job, self._rsh, self._all_users = job, list(rsh), all_users
        self._local = Sampler(job, all_users, this_host=bool(hosts))
        self._remote: dict[str, RemoteSampler] = {}
        self._seen_at: dict[str, float] = {}
        self._notes: list[dict[str, Any]] = []
        self._ended = threading.Event()
        for host in hosts:
            self.add_host(host)
        self._thread = threading.Thread(target=self._run, daemon=True, name="hub")
        self._thread.start()

    def add_host(self, name: str) -> None:
        """Sample one more host, unless it is sampled already."""
        if name not in self._remote:
            self._local.this_host = True
            self._remote[name] = RemoteSampler(name, self._rsh, self._job)

    def set_job(self, job: str) -> None:
        """Show this job, and no other. Before `add_host`."""
        self._job = self._local.job = job

    def note(self, text: str) -> None:
        """Put a line into the history of the job, once there is one."""
        with self.lock:
            self._notes.append({"at": time.time(), "text": text})

    def problems(self) -> list[str]:
        """Hosts without samples, and why."""
        return [f"host {r.name}: {r.problem}" for r in list(self._remote.values()) if r.problem]

    def close(self) -> None:
        """End all samplers."""
        self._ended.set()
        self._thread.join()
        for remote in self._remote.values():
            remote.close()
        self._local.close()

    def _run(self) -> None:
        while not self._ended.wait(until_next(ARRIVES_S)):
            began = time.thread_time()
            samples = {"this host": self._local.sample()}
            for name, remote in list(self._remote.items()):
                sample = remote.take()
                if sample is not None:
                    samples[name] = sample
            with self.lock:
                self._compare(samples)
            self.cost_s = time.thread_time() - began

    def _compare(self, samples: dict[str, Sample]) -> None:
        of_jobs: dict[str, list[Sample]] = {}
        for name, sample in samples.items():
            own = sample["host"] if name == "this host" else name
            found: dict[str, list[dict[str, Any]]] = {}
            for rank in sample["ranks"]:
                rank["sampled_by"] = own
                found.setdefault(rank["job"] or f"of process {rank['pid']}", []).append(rank)
            for of, ranks in found.items():
                of_jobs.setdefault(of, []).append({**sample, "host": own, "ranks": ranks})
        now = time.monotonic()
        for name in {*of_jobs, *self.jobs}:
            job = self.jobs.setdefault(name, Job(name))
            if name in of_jobs:
                self._seen_at[name] = now
            elif now - self._seen_at[name] > _KEPT_S:
                del self.jobs[name]
                continue
            job.feed(of_jobs.get(name, []))
            job.notes.extend(self._notes)
            self._notes.clear()
            for host, pids in job.stacks_wanted().items():
                if host in self._remote:
                    self._remote[host].request_stacks(pids)
                else:
                    self._local.request_stacks(pids)


def token(file: str | None) -> str:
    """A new random token, or that of a file that only this user can read. ValueError."""
    import secrets

    if file is None:
        return secrets.token_hex(16)
    with open(file, encoding="utf-8", opener=_regular) as opened:
        about = os.fstat(opened.fileno())
        if about.st_mode & 0o077 or about.st_uid != os.geteuid():
            raise ValueError(f"{file}: it must be yours alone: chmod 600")
        text = opened.read(1000).strip()
    if len(text) < 16 or not text.isascii() or not text.isprintable():
        raise ValueError(
            f"{file}: a token has 16 printable characters at least: openssl rand -hex 32"
        )
    return text


def _regular(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
