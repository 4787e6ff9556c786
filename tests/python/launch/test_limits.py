"""File descriptors: enough of them, or an error at once that says how many. Push tier, 4 s."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hororun_jobs import DEADLINE_S, HORORUN, environment, sh

from hororing._job import limits
from hororing._job.rendezvous.store import Store
from hororing.hororun import command
from hororing.hororun.host import cgroup, local
from hororing.hororun.host.local import CannotStartError, Program
from hororing.hororun.host.output import Output
from hororing.hororun.job import start
from hororing.hororun.job.ending import Grace

# Members of a store, one after the other; prints the reasons of those that are refused.
_MEMBERS = """
import sys
from hororing._job.rendezvous.client import Member, RendezvousError
sys.stdin.readline()
kept = []
for rank in range(20):
    try:
        kept.append(Member(sys.argv[1], secret=bytes(32), job="a job", rank=rank, size=20,
                           timeout_s=20))
    except RendezvousError as error:
        print(error)
        break
print(len(kept))
"""


def limited(
    soft: int, hard: int, command: list[str], **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with limits for its file descriptors."""
    return subprocess.run(
        command, env=environment(**more), capture_output=True, text=True, check=False,
        timeout=DEADLINE_S, stdin=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )  # fmt: skip


def test_hororun_raises_its_soft_limit_and_ranks_keep_the_users():
    done = limited(60, 4096, [*HORORUN, "-np", "16", *sh("ulimit -Sn")])
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(line.split("] ")[1] for line in done.stdout.splitlines()) == ["60"] * 16


def test_a_job_that_needs_more_is_refused_at_once_with_the_numbers():
    began = time.monotonic()
    done = limited(256, 256, [*HORORUN, "-np", "64", *sh("sleep 600")])
    assert done.returncode == 1
    assert time.monotonic() - began < DEADLINE_S / 3
    assert "hororun: 64 ranks, 64 of them on this host, need about 2" in done.stderr
    assert "which may have 256: raise the hard limit (ulimit -Hn)" in done.stderr
    assert len(done.stderr.splitlines()) == 1


GROUPS = {
    "version 2": (
        "0::/pod/one",
        {"pod/one/cpu.max": "max 100000", "pod/cpu.max": "50000 100000", "pod/one/pids.max": "max",
         "pod/pids.max": "40", "pod/pids.current": "31"},
    ),
    # The path is that of the host; only the container's own group is mounted.
    "version 1, a container": (
        "4:cpu,cpuacct:/docker/1\n3:pids:/docker/1\n0::/",
        {"cpu,cpuacct/cpu.cfs_quota_us": "150000", "cpu,cpuacct/cpu.cfs_period_us": "200000",
         "pids/pids.max": "40", "pids/pids.current": "31"},
    ),
    "none": ("4:cpu:/\n3:pids:/\n0::/", {"cpu/cpu.cfs_quota_us": "-1", "pids/pids.max": "max"}),
}  # fmt: skip


@pytest.mark.parametrize(("own", "files"), GROUPS.values(), ids=GROUPS)
def test_a_container_has_the_cores_and_processes_of_its_quota(
    own: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "_OWN", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    limited = own != GROUPS["none"][0]
    assert (cgroup.cores(), cgroup.processes_left()) == ((1, 9) if limited else (4, None))
    assert command._per_host("cpu") == (1 if limited else 4)
    assert local._with_threads(Program(0, (), {}, "/"))["OMP_NUM_THREADS"] == "14"[not limited]


def test_a_job_of_too_many_processes_is_refused_and_no_program_is_blamed_for_a_limit(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(cgroup, "processes_left", lambda: 100)
    what = start.Start([], ["true"], {}, [], 60.0, Grace())
    wanted = "64 ranks on this host need at least 192 processes and threads, and 100 more may be"
    with pytest.raises(CannotStartError, match=wanted):
        start._make_room(what, Output({}, 64, tag=True), 64, 64, connections=64)
    for number, wanted in (
        (errno.EMFILE, "out of file descriptors, of which this process may have "),
        (errno.EAGAIN, "no more processes or threads may be started: ulimit -u, or pids.max"),
        (errno.ENOENT, "python: No such file or directory"),
    ):
        text = limits.why_not_started(OSError(number, os.strerror(number)), "python")
        assert text.startswith(wanted)


def test_rank_0_says_that_its_store_needs_more(tmp_path: Path):
    script = "import hororing.numpy as hvd\nhvd.init()\n"
    done = limited(
        256, 256, [sys.executable, "-c", script], HORORING_RANK="0", HORORING_SIZE="500",
        HORORING_RENDEZVOUS=f"file://{tmp_path}", HORORING_JOB="a",
    )  # fmt: skip
    assert "TransportError: init: the 500 connections of the store need about 5" in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_store_without_file_descriptors_says_so_to_those_it_refuses(
    caplog: pytest.LogCaptureFixture,
):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = Store(job="a job", size=20, secret=bytes(32))
    store.start_thread()
    members = subprocess.Popen(
        [sys.executable, "-c", _MEMBERS, f"127.0.0.1:{store.port}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    try:
        taken = {int(each) for each in os.listdir("/proc/self/fd")}
        most = [number for number in range(len(taken) + 8) if number not in taken][7]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
        reason, kept = members.communicate("go\n", DEADLINE_S)[0].splitlines()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        members.kill()
        store.stop()
    wanted = f"the store has no file descriptors left: its process may open {most} (ulimit -n)"
    assert wanted in reason
    assert int(kept) < 20
    assert [each.getMessage() for each in caplog.records if wanted in each.getMessage()] != []
