"""The activity of a rank: in the warning of a stall, on request from outside, and after its death.

Push tier, 10 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mpirun
import pytest
from live_job import LiveJob, poll

from hororing import __main__
from hororing._engine import doctor, recorder

RANKS = Path(__file__).parents[1] / "support/ending_ranks.py"


def ask(capsys: pytest.CaptureFixture[str], *arguments: str | int | Path) -> str:
    assert __main__.main(["doctor", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@contextlib.contextmanager
def another_process(*files: int) -> Iterator[int]:
    """A process without a recorder of its own: this one has one once a test has called `init`."""
    with subprocess.Popen(["sleep", "60"], pass_fds=files) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_rank_that_others_wait_for_is_asked_what_it_is_doing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    environ = {"HORORING_STALL_WARNING_S": "1", "HORORING_FLIGHT_RECORDER": str(tmp_path)}
    with LiveJob(RANKS, 3, "be_busy_elsewhere", **environ) as job:
        pid = job.pid(1)
        # The warning.
        assert poll(lambda: "compute_instead" in job.printed(0)), job.report()
        warning = job.printed(0)
        assert "stall: waited up to 1 s for allreduce 'loss': submitted by ranks 0,2" in warning
        said = f"has yet to submit allreduce 'loss': pid {pid}; its last event: done "
        assert "\nrank 1 on host " in warning
        assert f"{said}allreduce 'before', " in warning
        assert f'File "{RANKS}", line ' in warning
        # From outside, while it runs.
        told = ask(capsys, "--pid", pid)
        assert f"rank 1 of 3, pid {pid} on host " in told
        assert "in flight: nothing" in told
        assert "done       allreduce 'before'" in told
        assert "in compute_instead" in told
        status = Path(f"/proc/{pid}/status").read_text()
        told = ask(capsys, re.findall(r"PPid:\s*(\d+)", status)[0])  # of the launcher
        verdict, header, *rows = told.splitlines()
        assert verdict == "allreduce 'loss': submitted by rank 0, 2, not by rank 1"
        assert header.split()[:4] == ["rank", "pid", "state", "step"]
        assert re.fullmatch(rf"1 +{pid} +\S.* +nothing +{RANKS}:\d+, in compute_instead", rows[1])
        assert re.search(r" allreduce 'loss', \d+\.\d s ago ", rows[0])
        told = ask(capsys, "--job", pid)
        assert told.count(" of 3, pid ") == 3
        # Of all jobs; but other jobs of this host are not this test's.
        listed = recorder.processes
        own = [job.pid(rank) for rank in range(3)]
        monkeypatch.setattr(
            recorder, "processes", lambda every: [p for p in listed(every) if p[0] in own]
        )
        assert f"\n1     {pid} " in ask(capsys)
        assert "in flight: allreduce 'loss' (submitted " in told
        assert "allreduce 'loss': submitted by rank 0, 2, not by rank 1" in told
        # While it is stopped.
        os.kill(pid, signal.SIGSTOP)
        told = ask(capsys, "--pid", pid)
        assert "main thread: has not written its stack" in told
        assert f"rank 1 is stopped: kill -CONT {pid} lets it go on\n" in told
        no_answer = "and does not answer: its process is stopped"
        assert poll(lambda: no_answer in job.printed(0)), job.report()
        # Killed.
        os.kill(pid, signal.SIGKILL)
        assert job.end() != 0
    files = sorted(tmp_path.glob("rank-*.hororing"))
    assert [file.name.split(".")[0] for file in files] == ["rank-0", "rank-1", "rank-2"]
    assert ask(capsys, *files).count(" of 3, pid ") == 3
    told = ask(capsys, files[1])
    assert f"rank 1 of 3, pid {pid} on host " in told
    assert "done       allreduce 'before'" in told
    assert "in compute_instead" in told  # from the last request


ALONE = """
import signal, sys
import numpy as np
import hororing.numpy as hvd
from hororing._engine import recorder
if sys.argv[1] == "handled":
    signal.signal(45, print)
hvd.init()
for step in range(3000):
    hvd.allreduce(np.ones(4), name=f"{step}." + "long" * (step % 100))
assert __import__("os").stat(recorder.find(__import__("os").getpid())).st_mode & 0o777 == 0o600
seen = recorder.ask_for_stack(__import__("os").getpid(), recorder.find(__import__("os").getpid()))
print(len(seen.events), seen.events[-1].request, bool(seen.stack), seen.unfinished())
assert seen.facts["command"].isprintable(), seen.facts  # though this script has lines
assert [each.time for each in seen.events] == sorted(each.time for each in seen.events)
"""


@pytest.mark.parametrize(
    ("how", "environ", "stack"),
    [("free", {}, True), ("handled", {}, False), ("off", {"HORORING_STACK_SIGNAL": "0"}, False)],
)
def test_the_last_events_are_kept_and_a_signal_of_the_script_is_its_own(
    how: str, environ: dict[str, str], stack: bool
):
    done = subprocess.run(
        [sys.executable, "-c", ALONE, how],
        env={**os.environ, **mpirun.LAUNCH_ENVIRONMENT, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    events = done.stdout.split(maxsplit=1)
    assert int(events[0]) == 1024
    name = "..." + ("2999." + "long" * 99)[-49:]
    assert events[1] == f"allreduce '{name}' {stack} []\n"


def test_doctor_says_why_there_is_nothing_to_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    other = tmp_path / "other"
    other.write_bytes(bytes(100_000))
    assert __main__.main(["doctor", str(other), "--pid", str(os.getppid())]) == 1
    printed = capsys.readouterr().err
    assert f"{other} is not a flight recorder of hororing" in printed
    assert "has not called hororing's init()" in printed
    monkeypatch.setattr(recorder, "processes", lambda all_users: iter(()))
    assert __main__.main(["doctor"]) == 1
    assert "no rank of this user runs on this host" in capsys.readouterr().err


def written(**facts: object) -> bytes:
    """A recorder's file with one event and a stack, as a process of another user may write it."""
    true = {
        "pid": 1, "host": "h", "job": "j", "command": "c", "stack_signal": 0, "rank": 0, "size": 1,
        "wall_minus_monotonic_ns": 0,
    }  # fmt: skip
    head = json.dumps({**true, **facts}).encode().ljust(1024, b"\0")
    event = (1).to_bytes(8, "little") + bytes([0, 0, 0, 0, 1, 0, 9]) + b"\x1b[2J\x9bname"
    ring = event.ljust(65536, b"\0")
    return head + (1).to_bytes(8, "little").ljust(1024, b"\0") + ring + b"  File \x1b]52;c;eA==\x07"


def test_doctor_prints_nothing_raw_that_another_user_may_have_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "\x1bc.hororing"
    evil = "\x1b]0;title\x07\x9b2J\n"
    file.write_bytes(written(host=evil, job=evil, command=evil))
    told = ask(capsys, file)
    assert "?]0;title??2J?, job ?]0;" in told
    assert "File ?]52;c;eA==?" in told
    assert told.replace("\n", "").isprintable()
    for wrong in (
        {"rank": evil}, {"pid": [evil]}, {"wall_minus_monotonic_ns": 10**300}, {"job": None},
        {"stack_signal": 9.5}, {"size": True},
    ):  # fmt: skip
        file.write_bytes(written(**wrong))
        assert __main__.main(["doctor", str(file)]) == 1, wrong
        printed = capsys.readouterr().err
        assert "?c.hororing is not a flight recorder" in printed
        assert printed.replace("\n", "").isprintable()
    file.write_bytes(b"[" * 1024 + bytes(66560))
    assert __main__.main(["doctor", str(file)]) == 1


def test_doctor_does_not_wait_for_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pipe = tmp_path / "a.hororing"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR)
    signal.alarm(20)  # a read would wait for ever
    try:
        with another_process() as pid:
            assert __main__.main(["doctor", "--pid", str(pid), str(pipe)]) == 1
    finally:
        signal.alarm(0)
        os.close(held)
    printed = capsys.readouterr().err
    assert f"{pipe} is not a flight recorder" in printed
    assert "has not called hororing's init()" in printed


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can read what another user has written")
def test_doctor_of_root_reads_other_users_only_on_request(capsys: pytest.CaptureFixture[str]):
    file = os.memfd_create(recorder.NAME)
    try:
        with another_process(file) as pid:
            os.write(file, written(pid=pid))
            os.fchown(file, 12345, 12345)
            assert __main__.main(["doctor", "--pid", str(pid)]) == 1
            assert "is of user 12345: --all-users" in capsys.readouterr().err
            assert recorder.find(pid, all_users=True) == f"/proc/{pid}/fd/{file}"
            assert f"pid {pid} on host h" in ask(capsys, "--all-users", "--pid", pid)
            assert "on host h" in ask(capsys, "--all-users", "--job", pid)
    finally:
        os.close(file)


def test_what_only_some_ranks_have_submitted_is_listed():
    def rank(number: int, *events: tuple[str, str]) -> recorder.Recording:
        made = [recorder.Event(0.0, kind, request) for kind, request in events]
        return recorder.Recording({"job": "j", "rank": number}, made, 0, "", {}, {})

    first = rank(0, ("submitted", "a"), ("done", "a"), ("submitted", "b"), ("submitted", "c"))
    second = rank(1, ("submitted", "c"), ("submitted", "d"), ("agreed", "d"))
    assert doctor.missing([first, second]) == ["b: submitted by rank 0, not by rank 1"]
    many = rank(0, *(("submitted", each) for each in "abcx"))
    few = rank(1, ("submitted", "x"))
    assert doctor.missing([many, few]) == ["a and 2 more: submitted by rank 0, not by rank 1"]
    of_set = f"b{recorder.OF_SET}1"
    third, fourth = rank(2, ("submitted", of_set)), rank(3)
    listed = f"{of_set}: submitted by rank 2, not by rank 3, as far as they belong to it"
    assert doctor.missing([third, fourth]) == [listed]
    third.facts["job"] = fourth.facts["job"] = "k"
    assert doctor.missing([first, second, third, fourth]) == [
        "job j: b: submitted by rank 0, not by rank 1", f"job k: {listed}",
    ]  # fmt: skip
