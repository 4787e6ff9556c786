"""hororun with small programs as ranks, on this host and through agents. Push tier, 12 s."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import mpirun
import pytest
from hororun_jobs import (
    DEADLINE_S,
    HORORUN,
    ROOT,
    SH,
    environment,
    is_alive,
    line,
    numbers,
    run,
    sh,
    wait_until,
)

from hororing._job.rendezvous import interfaces, protocol
from hororing.config.knobs import KNOBS
from hororing.hororun.command import _grace, main
from hororing.hororun.flags.host_lists import Host
from hororing.hororun.host.agent import MARK
from hororing.hororun.host.output import Output
from hororing.hororun.job import plan
from hororing.hororun.job.ending import Grace

# ---------------------------------------------------------------------------------------------
# Parts


def places(hosts: Sequence[Host], *how: int | None) -> list[tuple[int, str, int, int]]:
    found = plan.place(hosts, *how)
    return [(each.rank, each.host, each.local_rank, each.local_size) for each in found]


def test_ranks_fill_the_slots_of_one_host_after_the_other():
    two = [Host("a", 2), Host("b", 2)]
    assert places(two, 3, None, None) == [(0, "a", 0, 2), (1, "a", 1, 2), (2, "b", 0, 1)]
    assert places(two, None, None, None)[3] == (3, "b", 1, 2)
    assert places(two, None, 1, None) == [(0, "a", 0, 1), (1, "b", 0, 1)]
    assert places(two, None, None, 1) == [(0, "a", 0, 2), (1, "a", 1, 2)]
    assert places([Host("a"), Host("b")], 4, None, None)[2] == (2, "b", 0, 2)


@pytest.mark.parametrize(
    ("hosts", "how", "wanted"),
    [
        ([Host("a", 2)], (3, None, None), "-np 3: the hosts have 2 slots"),
        ([Host("a", 2)], (None, 3, None), "host a has 2 slots, of 3 needed"),
        ([Host("a"), Host("b")], (3, 1, None), "-np 3 contradicts 1 ranks on each of 2 hosts"),
        ([Host("a"), Host("b")], (3, None, None), "cannot be divided evenly over 2 hosts"),
        ([Host("a"), Host("b", 1)], (2, None, None), "slots for all hosts"),
        ([Host("a")], (None, None, None), "how many ranks"),
        ([Host("a")], (2, None, 2), "--nnodes 2: there are 1 hosts"),
    ],
)
def test_numbers_that_do_not_fit_are_an_error(hosts: list[Host], how: tuple[int, ...], wanted: str):
    with pytest.raises(ValueError, match=wanted):
        plan.place(hosts, *how)


class Pipe:
    def __init__(self) -> None:
        self.text = b""

    def write(self, data: bytes) -> int:
        self.text += data[:7]  # as a pipe may
        return len(data[:7])


def test_lines_are_whole_and_bytes_stay_what_they_are(tmp_path: Path):
    out, err = Pipe(), Pipe()
    output = Output({"stdout": out, "stderr": err}, 11, tag=True)  # type: ignore[dict-item]
    for piece in (b"a", b"b\nhal", b"f \xff\xc3", b"\n"):
        output.write(0, "stdout", piece)
        output.write(10, "stdout", piece)
    output.write(3, "stdout", b"10 %\r20")
    output.write(3, "stdout", b" %\r")
    output.write(3, "stdout", b"\n")  # a line that ends in \r\n is one
    output.write(4, "stderr", b"no end")
    assert output.tail(4) == [b"no end"]
    output.close()
    assert out.text == (
        b"[10] ab\n[ 0] ab\n[ 0] half \xff\xc3\n[10] half \xff\xc3\n[ 3] 10 %\r[ 3] 20 %\r\n"
    ).replace(b"[10] ab\n[ 0] ab\n", b"[ 0] ab\n[10] ab\n")
    assert err.text == b"[ 4] no end\n"


def test_a_single_rank_prints_its_own_bytes():
    out = io.BytesIO()
    output = Output({"stdout": out}, 1, tag=False)  # type: ignore[dict-item]
    for data in (b"x" * 200_000, b'{"no": "end of line"}', b""):
        output.write(0, "stdout", data)
    assert out.getvalue() == b"x" * 200_000 + b'{"no": "end of line"}'


def test_lines_of_some_mib_stay_whole_and_longer_ones_get_an_end():
    out = io.BytesIO()
    output = Output({"stdout": out}, 2, tag=True)  # type: ignore[dict-item]
    long = b"x" * 3_000_000
    for at in range(0, len(long), 2**16):
        output.write(0, "stdout", long[at : at + 2**16])
        output.write(1, "stdout", b"between\r")
        output.write(1, "stdout", b"\n")
    output.write(0, "stdout", b"\n")
    assert out.getvalue().splitlines()[-1] == b"[0] " + long
    assert out.getvalue().count(b"[1] between\r\n") == out.getvalue().count(b"[1]") == 46
    output.write(0, "stdout", 2 * long)
    assert out.getvalue().endswith(b"\n[0] " + 2 * long + b"\n")


def test_a_full_disk_is_an_error_in_the_log_and_tried_again(tmp_path: Path):
    class Full(Pipe):
        left = 7

        def write(self, data: bytes) -> int:
            if not self.left:
                raise OSError(28, "No space left on device")
            count = min(len(data), self.left)
            self.left -= count
            return super().write(bytes(data[:count]))

    out, err = Full(), Pipe()
    output = Output({"stdout": out, "stderr": err}, 1, tag=False)  # type: ignore[dict-item]
    for _ in range(3):
        output.write(0, "stdout", b"0123456789\n")
    out.left = 99
    output.write(0, "stdout", b"again\n")
    assert out.text == b"0123456again\n"
    assert err.text.decode().splitlines() == [
        "hororun: ERROR: cannot write standard output: No space left on device; until that works, "
        "output is lost",
        "hororun: ERROR: standard output is written again, and lacks 26 bytes",
    ]
    err.text = b""
    output = Output({"stderr": err}, 2, tag=True, directory=str(tmp_path))  # type: ignore[dict-item]
    output.open_files(2)
    real, full = output._files[1, "stdout"], Full()
    output._files[1, "stdout"] = full  # type: ignore[assignment]
    output.write(1, "stdout", b"0123456789\n")
    output.write(1, "stdout", b"more\n")
    output._files[1, "stdout"] = real
    output.write(1, "stdout", b"again\n")
    output.write(0, "stdout", b"other\n")
    output.close()
    assert (
        tmp_path / "rank.1/stdout"
    ).read_text() == "\nhororun: 9 bytes are missing here\nagain\n"
    assert (tmp_path / "rank.0/stdout").read_text() == "other\n"
    assert err.text.count(b"ERROR") == 2


def test_output_that_nobody_reads_ends_nothing():
    class Broken(Pipe):
        def write(self, data: bytes) -> int:
            raise BrokenPipeError

    output = Output({"stdout": Broken()}, 1, tag=False)  # type: ignore[dict-item]
    output.write(0, "stdout", b"a\n")
    output.write(0, "stdout", b"b\n")
    for reader in ("| head -n 1", ">&-"):  # closed: daemons start programs so
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {sys.executable} -m hororing.hororun -np 2 seq 9999 "
             f"{reader}"],
            env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------------------------------------
# One host


# A rank runs this to check that no process shows the job's secret: the launcher, agents, the guard,
# other ranks.
LOOK_FOR_THE_SECRET = """
import glob, os
secret = os.pread(int(os.environ["HORORING_SECRET_FD"]), 99, 0)
assert len(secret) == 32
shown = []
for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
    try:
        text = open(path, "rb").read()
    except OSError:
        continue
    shown += [path] * (secret in text or secret.hex().encode() in text)
assert not shown, shown
"""


def test_ranks_know_their_places_and_the_secret_is_a_descriptor():
    script = LOOK_FOR_THE_SECRET + (
        "import json;print(json.dumps({'env': dict(os.environ), 'stdin': os.read(0, 9) != b''}))"
    )
    flags = ["-np", "2", "--no-tag-output", "--cycle-time-ms=2", "--no-reproducible", "-x", "A=b"]
    done = run(*flags, sys.executable, "-c", script, HORORING_SECRET_KEY="outer")
    assert done.returncode == 0, done.stderr
    told = sorted((json.loads(each) for each in done.stdout.splitlines()),
                  key=lambda each: each["env"]["RANK"])  # fmt: skip
    for rank, each in enumerate(told):
        env = each["env"]
        for prefix in ("HORORING_", ""):
            assert env[f"{prefix}RANK"] == env[f"{prefix}LOCAL_RANK"] == str(rank)
            assert env["HORORING_SIZE"] == env["WORLD_SIZE"] == "2"
            assert env["HORORING_LOCAL_SIZE"] == env["LOCAL_WORLD_SIZE"] == "2"
        assert re.fullmatch(r"127\.0\.0\.1:\d+", env["HORORING_RENDEZVOUS"])
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert 0 < int(env["MASTER_PORT"]) < 2**16
        assert (env["A"], env["HORORING_CYCLE_TIME_MS"], env["HORORING_REPRODUCIBLE"]) == (
            "b", "2", "0",
        )  # fmt: skip
        assert "HORORING_SECRET_KEY" not in env  # the secret of an outer job
        assert each["stdin"] is False
    assert told[0]["env"]["HORORING_JOB"] == told[1]["env"]["HORORING_JOB"]


def test_programs_that_a_script_starts_inherit_no_secret():
    script = (
        "import os; from hororing import config;"
        "from hororing._job import bootstrap, launchers as launch;"
        "m = bootstrap.find(launch.detect(), config.load());"
        "os.system('ls -l /proc/self/fd/'); m.done()"
    )
    done = run("-np", "2", sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    assert " 0 -> " in done.stdout
    assert "secret" not in done.stdout


def test_ranks_share_the_cores_of_their_host():
    shown = sh("echo threads=$OMP_NUM_THREADS")
    own = str(max(len(os.sched_getaffinity(0)) // 2, 1))
    assert run("-np", "2", *shown, OMP_NUM_THREADS="").stdout.count("threads=\n") == 2
    assert run("-np", "2", *shown, OMP_NUM_THREADS="7").stdout.count("threads=7") == 2
    job = subprocess.run(
        [*HORORUN, "-np", "2", *shown],
        env={name: text for name, text in environment().items() if name != "OMP_NUM_THREADS"},
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert job.stdout.count(f"threads={own}") == 2


def test_ranks_meet_in_the_store_of_hororun():
    script = (
        "from hororing import config; from hororing._job import bootstrap, launchers as launch;"
        "m = bootstrap.find(launch.detect(), config.load());"
        "print(m.share(str(m.rank), 20)); m.done()"
    )
    # Rank 2's program starts another one, to which subprocess passes no descriptor.
    wrapper = (
        "import os, subprocess, sys; python = [sys.executable, '-c', sys.argv[1]]\n"
        "if os.environ['RANK'] == '2': sys.exit(subprocess.call(python))\n"
        "os.execv(python[0], python)"
    )
    done = run("-np", "3", sys.executable, "-c", wrapper, script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{n}] ['0', '1', '2']" for n in range(3)]


def test_a_worker_that_imports_the_script_again_is_told_what_to_do(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing\n"
        "import hororing.numpy as hvd\n"
        "hvd.init()\n"
        "worker = multiprocessing.get_context('forkserver').Process(target=print)\n"
        "worker.start()\n"
        "worker.join()\n"
    )
    done = run("-np", "2", sys.executable, str(script))
    assert "put the script's code under if __name__ == '__main__':" in done.stderr


def test_a_rank_that_ends_without_init_is_an_error_of_those_who_wait_for_it():
    script = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1': time.sleep(1); sys.exit()\n"
        "import hororing.numpy as hvd; hvd.init()"
    )
    done = run("-np", "2", sys.executable, "-c", script)
    assert done.returncode == 1
    assert "PeerLostError: init: rank 1 has ended without calling init()" in done.stderr


def test_the_first_failure_is_shown_and_ends_the_job(tmp_path: Path):
    script = (
        "import os, sys, time\n"
        "if os.environ['RANK'] != '2': print('here', flush=True); time.sleep(600)\n"
        "for n in range(20): print('line', n, file=sys.stderr)\n"
        "sys.exit(7)"
    )
    done = run("-np", "3", sys.executable, "-c", script)
    assert done.returncode == 7
    last = [
        *(f"[2] line {n}" for n in range(10, 20)),
        "hororun: rank 2 has failed with exit code 7",
    ]
    assert done.stderr.splitlines()[-11:] == last  # once
    done = run("-np", "3", "--output", str(tmp_path), sys.executable, "-c", script)
    last = done.stderr.splitlines()[-11:]
    assert last[0] == (
        "hororun: rank 2 has failed with exit code 7; the last lines of its standard error:"
    )
    assert last[1:] == [f"hororun:     line {n}" for n in range(10, 20)]
    done = run("-np", "2", *sh("[ $RANK = 0 ] && kill -9 $$; sleep 600"))
    assert done.returncode == 137
    assert "rank 0 was killed by SIGKILL; its standard error is empty\n" in done.stderr
    assert "out of memory: see `dmesg`" in done.stderr.splitlines()[-1]


def test_the_last_lines_are_those_of_the_rank_that_the_first_one_names():
    script = (
        "case $RANK in\n"
        "0) sleep 0.5; echo 'a.PeerLostError: rank 2 failed: ValueError: bad' >&2; exit 1;;\n"
        "1) trap '' TERM; sleep 1;;\n"
        "2) echo 'ValueError: bad' >&2; trap '' TERM; sleep 1; exit 1;;\n"
        "esac"
    )
    done = run("-np", "3", *sh(script))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        "[0] a.PeerLostError: rank 2 failed: ValueError: bad",
        "hororun: rank 0 has failed with exit code 1, because of rank 2",
    ]


def test_who_ignores_the_request_to_end_is_ended_after_the_time_of_grace():
    script = "trap '' TERM; [ $RANK = 1 ] && { sleep 0.3; exit 3; }; while :; do sleep 0.05; done"
    began = time.monotonic()
    done = run("-np", "2", "--grace", "0.3", *sh(script))
    assert done.returncode == 3
    assert time.monotonic() - began < DEADLINE_S / 2
    wanted = "rank 0 had not ended 0.3 s after SIGTERM and will be killed; --grace allows longer"
    assert f"hororun: {wanted}\n" in done.stderr


def test_after_a_signal_ranks_have_the_time_that_schedulers_give(
    started: Callable[..., subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert _grace(None) == Grace(failed_s=5, asked_s=30)
    assert _grace(7) == Grace(failed_s=7, asked_s=7)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'InactiveLimit = 0 sec'; echo 'KillWait   = 2 sec'\n")
    scontrol.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert _grace(None) == Grace(failed_s=5, asked_s=1)
    process = started("-np", "1", *sh("trap '' TERM; echo here; while :; do sleep 0.05; done"))
    line(process)
    process.terminate()
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143
    assert "rank 0 had not ended 1 s after SIGTERM and will be killed" in errors


def test_a_job_whose_ranks_never_call_init_ends_with_a_line_that_says_so():
    init = "import hororing.numpy as hvd; hvd.init()"
    for size, script, told in ((2, "pass", True), (1, "pass", False), (2, init, False)):
        done = run("-np", str(size), sys.executable, "-c", script)
        assert done.returncode == 0
        assert ("the program ran 2 times, each time alone" in done.stderr) is told, done.stderr
        assert done.stderr.count("\n") == told


@pytest.mark.parametrize(
    ("command", "code", "wanted"),
    [
        (["no-such-program"], 127, "there is no program 'no-such-program'"),
        ([__file__], 127, "is not executable: write python "),
        ([], 2, "no program given"),
        (["--fusion-bytes", "much", SH], 2, "'much' is not understood: expected bytes"),
        (["--only-output-from", "2", SH], 2, "there is no rank 2 among 2"),
        (["-H", "a:1", SH], 2, "the hosts have 1 slots"),
        (["-H", f"localhost:1,{socket.gethostname()}:1", SH], 2, "are both this host"),
        (["--hostfile", "/none", SH], 2, "/none"),
        (["-x", "NO_SUCH", SH], 2, "-x NO_SUCH: it is not set here"),
        (["-x", "=3", SH], 2, "-x =3: write -x NAME or -x NAME=VALUE"),
        (["--only-output-from", ",", SH], 2, "it names no rank"),
        (["--rsh-agent", "a 'b", SH], 2, "No closing quotation"),
        (["--mpi", "--mpi-args", "a 'b", SH], 2, "No closing quotation"),
        (
            ["--config-file", "a.yaml", SH],
            2,
            "--config-file of horovodrun has no counterpart: give",
        ),
        (["--binding-args=--bind-to none", SH], 2, "use --numa-aware, or with --mpi: --mpi-args"),
        (["--mpi-args=--oversubscribe", SH], 2, "--mpi-args needs --mpi"),
        (["--mpi", "--gloo", SH], 2, "--gloo and --mpi exclude each other"),
        (["--output", "/dev/null/a", SH], 1, "/dev/null/a"),
    ],
)
def test_what_cannot_be_started_is_an_error(
    command: list[str], code: int, wanted: str, capfd: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as end:
        sys.exit(main(["-np", "2", *command]))
    assert end.value.code == code
    out, errors = capfd.readouterr()
    assert out == ""
    assert wanted in errors


def test_a_working_directory_that_was_deleted_is_named(tmp_path: Path):
    gone = tmp_path / "gone"
    there = f"mkdir {gone}; cd {gone}; rmdir {gone}; exec {sys.executable} "
    done = subprocess.run(
        sh(there + "-m hororing.hororun -np 1 true"), env=environment(), capture_output=True,
        text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    wanted = f"hororun: the working directory is {gone} (deleted): go to another one\n"
    assert done.stderr == wanted
    alone = "import hororing.numpy as hvd; hvd.init(); print(hvd.size())"
    done = subprocess.run(
        sh(there + f"-c '{alone}'"), env=environment(), capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.stdout == "1\n", done.stderr


def test_many_lines_stay_whole_and_in_order(tmp_path: Path):
    script = 'i=0; while [ $i -lt 200 ]; do echo "$i of $RANK is a line"; i=$((i+1)); done'
    done = run("-np", "8", "--only-output-from", "1-6,7", *sh(script))
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    for rank in range(8):
        mine = [each for each in lines if each.startswith(f"[{rank}] ")]
        wanted = [f"[{rank}] {n} of {rank} is a line" for n in range(200)]
        assert mine == (wanted if rank else [])
    done = run("-np", "11", "--output", str(tmp_path / "out"), *sh("printf $RANK; echo e >&2"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "[ 0] 0\n", "[ 0] e\n")
    assert (tmp_path / "out/rank.03/stdout").read_text() == "3"
    assert (tmp_path / "out/rank.10/stderr").read_text() == "e\n"


def test_rank_0_has_the_standard_input():
    done = subprocess.run(
        [*HORORUN, "-np", "2", *sh("cat")], env=environment(), input=b"\xfft", timeout=DEADLINE_S,
        capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout == b"[0] \xfft\n"


# ---------------------------------------------------------------------------------------------
# Ends

WAITS = "trap 'exit 9' USR1; echo pid=$$; sleep 600 & echo pid=$!; wait; wait"


def test_ctrl_c_ends_the_ranks_and_twice_ends_them_at_once(
    started: Callable[..., subprocess.Popen[str]],
):
    process = started("-np", "2", *sh(WAITS))
    pids = numbers("".join(line(process) for _ in range(4)))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, errors
    assert "hororun: ended by SIGINT" in errors
    wait_until(lambda: not any(map(is_alive, pids)))

    stubborn = "trap '' INT TERM; echo pid=$$; while :; do sleep 0.05; done"
    process = started("-np", "2", "--grace", "600", *sh(stubborn))
    pids = numbers("".join(line(process) for _ in range(2)))
    end = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < end:
        process.send_signal(signal.SIGINT)  # two simultaneous signals count as one
        time.sleep(0.1)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode in (130, -signal.SIGINT)  # a signal may arrive at its end
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_signal_ends_a_job_whose_output_nobody_reads(
    started: Callable[..., subprocess.Popen[str]],
):
    process = started("-np", "2", "yes", "x" * 4000)
    line(process)
    time.sleep(0.2)  # the pipe is full long before
    process.terminate()
    assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM


def test_signals_reach_the_ranks_and_graceful_ends_are_no_failures(
    started: Callable[..., subprocess.Popen[str]],
):
    process = started("-np", "2", *sh(WAITS))
    for _ in range(4):
        line(process)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 9
    script = "trap 'echo saved; exit 0' TERM; echo pid=$$; while :; do sleep 0.02; done"
    process = started("-np", "2", *sh(script))
    for _ in range(2):
        line(process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, sorted(out.splitlines())) == (0, ["[0] saved", "[1] saved"])


def test_ranks_and_their_children_die_with_hororun_even_if_it_is_killed(
    started: Callable[..., subprocess.Popen[str]],
):
    script = "trap '' TERM HUP; sleep 600 & echo pid=$!; echo pid=$$; while :; do sleep 0.05; done"
    process = started("-np", "2", *sh(script))
    pids = numbers("".join(line(process) for _ in range(4)))
    assert all(map(is_alive, pids))
    process.kill()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_rank_that_stays_stopped_when_all_others_have_ended_is_killed():
    done = run("-np", "2", "--grace", "0.5", *sh("[ $RANK = 0 ] || kill -STOP $$"))
    assert done.returncode == 128 + signal.SIGSTOP
    wanted = "rank 1 was stopped by a signal, did not go on after all others had ended, and was"
    assert wanted in done.stderr


def test_a_rank_that_goes_on_is_not(started: Callable[..., subprocess.Popen[str]]):
    script = "echo pid=$$; [ $RANK = 0 ] || { kill -STOP $$; sleep 1.5; echo done; }"
    process = started("-np", "2", "--grace", "3", *sh(script))
    pids = [
        int(re.findall(r"pid=(\d+)", each)[0]) for each in sorted((line(process), line(process)))
    ]
    status = Path(f"/proc/{pids[1]}/stat")
    wait_until(lambda: not is_alive(pids[0]) and ") T " in status.read_text())
    os.kill(pids[1], signal.SIGCONT)
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (0, "[1] done\n")


def test_a_rank_is_not_started_by_a_parent_that_is_dead():
    wrapper = ROOT / "hororing/hororun/host/exec_rank.py"
    done = subprocess.run([sys.executable, "-I", "-S", wrapper, "1", "-1", SH, "-c", "echo here"],
                          capture_output=True, check=False, timeout=DEADLINE_S)  # fmt: skip
    assert (done.returncode, done.stdout) == (137, b"")


def test_what_a_rank_leaves_behind_is_ended():
    began = time.monotonic()
    done = run("-np", "2", *sh("(trap '' TERM HUP; sleep 600) & echo pid=$!; printf half"))
    assert done.returncode == 0
    assert time.monotonic() - began < DEADLINE_S / 2
    assert done.stdout.count("half\n") == 2
    wait_until(lambda: not any(map(is_alive, numbers(done.stdout))))


# Starts three processes in sessions of their own, as services and daemons do, and prints their ids.
DAEMONS = """
import os, subprocess, sys, time
deaf = subprocess.Popen(
    ["sh", "-c", "trap '' TERM; echo up; sleep 600; sleep 600"], stdout=subprocess.PIPE,
    start_new_session=True,
)
deaf.stdout.readline()
sleep = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, start_new_session=True)
os.system("setsid sh -c 'echo $$ > $TMPDIR/$RANK; exec sleep 600' > /dev/null 2>&1 &")
path = os.path.join(os.environ["TMPDIR"], os.environ["RANK"])
while not (os.path.exists(path) and open(path).read().endswith("\\n")):
    time.sleep(0.01)
print(f"pid={deaf.pid} pid={sleep.pid} pid={open(path).read().strip()}", flush=True)
open(path + ".told", "w").close()
while sum(name.endswith(".told") for name in os.listdir(os.environ["TMPDIR"])) < 2:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("how", ["exit", "fail", "TERM", "KILL"])
def test_daemons_of_ranks_end_with_the_job(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    started: Callable[..., subprocess.Popen[str]],
):  # fmt: skip
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    end = {"exit": "", "fail": "sys.exit(3)"}.get(how, "time.sleep(600)")
    process = started("-np", "2", sys.executable, "-c", DAEMONS + end)
    pids = numbers(line(process) + line(process))
    assert len(pids) == 6
    if how in ("TERM", "KILL"):
        assert all(map(is_alive, pids))
        process.send_signal(getattr(signal, f"SIG{how}"))
    process.communicate(timeout=DEADLINE_S)
    if how == "KILL":
        wait_until(lambda: not any(map(is_alive, pids)))
    assert not any(map(is_alive, pids))


def test_the_guard_ends_the_daemons_of_an_ended_rank_and_no_others():
    def daemon(*variables: str) -> subprocess.Popen[bytes]:
        environ = dict(each.split("=") for each in variables)
        return subprocess.Popen(["/bin/sleep", "600"], env=environ, start_new_session=True)

    job = f"HORORING_JOB={os.urandom(8).hex()}"
    first, second = daemon(job, "HORORING_RANK=0"), daemon(job, "HORORING_RANK=10", "A=b")
    other = daemon("HORORING_JOB=other", "HORORING_RANK=0")
    guard = subprocess.Popen([sys.executable, ROOT / "hororing/hororun/host/guard.py"],
                             stdin=subprocess.PIPE, text=True)  # fmt: skip
    assert guard.stdin is not None
    try:
        guard.stdin.write(f"{2**22} {job} HORORING_RANK=0\n{2**22 + 1} {job} HORORING_RANK=10\n")
        guard.stdin.write(f"{2**22 + 2}\n{-(2**22)}\n")  # no such groups; one has no mark
        guard.stdin.flush()
        assert first.wait(DEADLINE_S) == -signal.SIGTERM
        assert (second.poll(), other.poll()) == (None, None)
        guard.stdin.close()
        assert second.wait(DEADLINE_S) == -signal.SIGTERM
        assert guard.wait(DEADLINE_S) == 0
        assert other.poll() is None
    finally:
        for each in (first, second, other, guard):
            each.kill()
            each.wait()


def test_what_a_rank_leaves_behind_may_print_on():  # push tier, 1 s
    with Path(os.devnull).open("wb") as nowhere:
        done = subprocess.run(
            [*HORORUN, "-np", "1", *sh("yes & sleep 0.3; exit 3")],
            env=environment(), stdout=nowhere, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
    assert done.returncode == 3


# ---------------------------------------------------------------------------------------------
# Other hosts


def test_agents_start_ranks_on_other_hosts(rsh: str):
    script = 'echo "$ON.$RANK.$LOCAL_RANK.$LOCAL_WORLD_SIZE.$A.$HORORING_GPU.$PYTHONPATH.$(pwd)"'
    done = run("-H", "localhost:1,b:2,c:1", "--rsh-agent", rsh, "-x", "A=x y", *sh(script),
               HORORING_GPU="staged")  # fmt: skip
    assert done.returncode == 0, done.stderr
    for wanted in ("b.1.0.2", "b.2.1.2", "c.3.0.1"):
        assert f"{wanted}.x y.staged..{os.getcwd()}" in done.stdout
    assert f"] .0.0.1.x y.staged.{ROOT}.{os.getcwd()}" in done.stdout
    flags = ["-x", "MASTER_PORT=2345", "--rsh-agent", rsh]
    as_user = run("-H", "me@b:1", *flags, *sh("echo $ON $MASTER_ADDR $MASTER_PORT"))
    assert as_user.stdout == "me@b b 2345\n"


def test_variables_that_ranks_must_share_reach_other_hosts_and_others_are_named_once(rsh: str):
    done = run(
        "-H", "localhost:1,a:1,b:1", "--rsh-agent", rsh,
        *sh("echo $OMP_NUM_THREADS $PYTHONHASHSEED"),
        OMP_NUM_THREADS="7", PYTHONHASHSEED="4", LD_LIBRARY_PATH="/opt/lib",
    )  # fmt: skip
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0] 7 4", "[1] 7 4", "[2] 7 4"]
    told = [each for each in done.stderr.splitlines() if "LD_LIBRARY_PATH" in each]
    assert len(told) == 1
    assert told[0].endswith("do not get that of this host: -x LD_LIBRARY_PATH passes it")
    done = run("-H", "localhost:1,a:1", "--rsh-agent", rsh, "-x", "LD_LIBRARY_PATH", "-x",
               "PYTHONPATH", *sh(":"), LD_LIBRARY_PATH="/opt/lib")  # fmt: skip
    assert done.stderr == ""


def test_an_address_of_this_host_needs_no_ssh(rsh: str):
    own = interfaces.addresses()[0]
    if own.startswith("127."):
        pytest.skip("this host has no address but its own")
    script = sh("echo .$ON.$MASTER_ADDR")
    done = run("-H", f"{own}:1,b:1", "--rsh-agent", rsh, *script)
    assert sorted(done.stdout.splitlines()) == [f"[0] ..{own}", f"[1] .b.{own}"], done.stderr


def test_ranks_of_several_hosts_meet(rsh: str):
    script = LOOK_FOR_THE_SECRET + (
        "from hororing import config; from hororing._job import bootstrap, launchers as launch;"
        "m = bootstrap.find(launch.detect(), config.load());"
        "print(m.share(str(m.rank), 20)); m.done()"
    )
    done = run("-np", "3", "-H", "localhost,b,c", "--rsh-agent", rsh, "-x", "PYTHONPATH",
               sys.executable, "-c", script)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{n}] ['0', '1', '2']" for n in range(3)]


def test_a_failure_on_another_host_is_named_and_ends_all(rsh: str):
    script = "echo $RANK says >&2; [ $RANK = 1 ] && exit 5; sleep 600"
    done = run("-H", "localhost:1,b:1,c:1", "--rsh-agent", rsh, *sh(script))
    assert done.returncode == 5
    assert "[1] 1 says\n" in done.stderr
    assert "hororun: rank 1 on host b has failed with exit code 5\n" in done.stderr


def test_an_agent_that_dies_ends_the_job(rsh: str, started: Callable[..., subprocess.Popen[str]]):
    script = "echo pid=$$; [ $RANK = 1 ] && kill -9 $PPID; sleep 600"
    process = started("-H", "localhost:1,b:1", "--rsh-agent", rsh, *sh(script))
    out, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 255
    assert "host b: the connection with hororun's agent there has ended; try: " in errors
    wait_until(lambda: not any(map(is_alive, numbers(out))))


def test_ranks_of_other_hosts_die_with_hororun(
    rsh: str, started: Callable[..., subprocess.Popen[str]]
):
    script = "trap '' TERM HUP INT; echo pid=$$; while :; do sleep 0.05; done"
    process = started("-H", "localhost:1,b:1", "--rsh-agent", rsh, *sh(script))
    pids = numbers("".join(line(process) for _ in range(2)))
    process.kill()
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize(
    ("agent", "wanted"),
    [
        ("/bin/false", "host b: it cannot be reached, or cannot run hororing; try: "),
        ("/none/at/all", "host b: it cannot be reached, or cannot run hororing; try: "),
        (
            "/bin/sh -c 'sleep 600 & echo pid=$! >&2; wait'",
            "no agent answers on b after 0.3 s (--start-timeout)",
        ),
        ("/bin/sh -c 'yes | head -c 1000000'", "its agent sent an invalid message"),
    ],
)
def test_a_host_that_does_not_answer_is_an_error(agent: str, wanted: str):
    timeout = "0.3" if "sleep" in agent else str(DEADLINE_S)
    done = run("-H", "b:1", "--rsh-agent", agent, "--start-timeout", timeout, SH)
    assert done.returncode == 1
    assert wanted in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    wait_until(lambda: not any(map(is_alive, numbers(done.stderr))))


def test_a_host_that_dies_before_another_answers_is_an_error_at_once(tmp_path: Path):  # 1 s
    agent = tmp_path / "agent"
    ready = f"sys.stdout.buffer.write({MARK + protocol.encode({'ready': 1})!r})"
    agent.write_text(
        f"#!{sys.executable}\nimport sys, time\n"
        f"{ready} if sys.argv[1] == 'b' else time.sleep(600)\n"
    )
    agent.chmod(0o755)
    done = run("-H", "b:1,c:1", "--rsh-agent", str(agent), "--start-timeout", "500", SH)
    assert done.returncode == 1
    assert "host b: the connection with hororun's agent there has ended" in done.stderr


def test_the_time_for_other_hosts_may_come_from_horovods_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "soon")
    with pytest.raises(SystemExit):
        main(["-np", "1", "true"])
    assert "--start-timeout: 'soon' is not a number of seconds" in capsys.readouterr().err


def test_a_program_that_is_missing_there_is_an_error(rsh: str, tmp_path: Path):
    done = run("-H", "b:1", "--rsh-agent", f"env -C / {rsh}", "--output", str(tmp_path), "-x",
               "PATH=/none", "env", "no-such-program")  # fmt: skip
    assert done.returncode == 127
    assert "rank 0 on host b has failed with exit code 127" in done.stderr


@pytest.mark.skipif(bool(mpirun.why_no_hosts()), reason=mpirun.why_no_hosts())
def test_hosts_with_networks_of_their_own(tmp_path: Path):
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os\nfrom hororing import config\n"
        "from hororing._job import bootstrap, launchers as launch\n"
        "m = bootstrap.find(launch.detect(), config.load())\n"
        "print(m.share(os.uname().nodename + ' ' + m.local_address, 20)); m.done()\n"
    )
    hosts = tmp_path / "hororun"
    # hosts.sh starts it like mpirun: --hostfile FILE -np N. The host's first address is unreachable
    # for others, like those of virtual machines and containers.
    hosts.write_text(
        "#!/bin/bash\nip addr flush dev eth0; ip addr add 172.31.0.1/24 dev eth0\n"
        f"ip addr add 10.77.0.1/24 dev eth0; exec {sys.executable} -m hororing.hororun --rsh-agent "
        '"$PRTE_MCA_plm_ssh_agent" "$@"\n'
    )
    hosts.chmod(0o755)
    done = subprocess.run(
        [mpirun.HOSTS, "1,2", hosts, "-x", "PYTHONPATH", sys.executable, script],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lists = {each.partition(" ")[2] for each in done.stdout.splitlines()}
    assert len(lists) == 1, done.stdout
    told = re.findall(r"'([^']*)'", lists.pop())
    assert told == ["host0 10.77.0.1", "host1 10.77.0.2", "host1 10.77.0.2"]


# ---------------------------------------------------------------------------------------------
# Instead of starting


def test_there_is_a_flag_for_every_setting_and_for_what_horovod_calls_them(
    capfd: pytest.CaptureFixture[str],
):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capfd.readouterr().out
    for knob in KNOBS:
        if knob.name != "ALONE":
            assert f"--{knob.name.lower().replace('_', '-')}" in text
    flags = "--fusion-threshold-mb 32 --timeline-filename t --disable-cache"
    flags += " --autotune-bayes-opt-max-samples 9 --autotune-gaussian-process-noise 0.5"
    flags += " --network-interface a,b --network-interface c --gloo"
    flags += " --stall-check --no-torus-allreduce --no-log-hide-timestamp"
    words = ["-np", "2", "--dry-run", *flags.split(), "env", "-np", "3"]
    assert main(words) == 0
    shown = capfd.readouterr().out
    for wanted in (
        "HORORING_FUSION_BYTES=32MiB", "HORORING_TIMELINE=t", "HORORING_RANK=1",
        "HORORING_INTERFACE=a,b,c", "/env -np 3\n",
        "HORORING_LOG_HIDE_TIME=0", "HOROVOD_STALL_CHECK_DISABLE=0", "HOROVOD_TORUS_ALLREDUCE=0",
    ):  # fmt: skip
        assert wanted in shown
    assert "SECRET" not in shown
    assert "CACHE_CAPACITY" not in shown  # --disable-cache is of another cache


def test_flags_that_mpirun_does_not_have_are_refused_with_it():
    done = run("-np", "2", "--mpi", "--output", "folder", "python", "t.py")
    assert done.returncode == 2
    assert "--output cannot be combined with --mpi" in done.stderr


def test_a_value_that_others_must_not_see_is_in_no_command_line_but_hororuns(tmp_path: Path):
    fake = tmp_path / "mpirun"
    fake.write_text('#!/bin/sh\necho "$@" "in its environment: $TOKEN"\n')
    fake.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    done = run("-np", "2", "--mpi", "-x", "TOKEN=abc", "-x", "B=c", "true", PATH=path)
    assert done.returncode == 0, done.stderr
    assert "-x TOKEN -x B true in its environment: abc" in done.stdout
    assert "TOKEN=abc" not in done.stdout
    assert "see the value of -x TOKEN=... (ps): set the variable, and give -x TOKEN" in done.stderr
    assert "-x B" not in done.stderr
    # The launcher of hororun's own is the test, hence no process of this user but hororun has it.
    rank = (
        "import glob, os\n"
        "for path in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try: text = open(path, 'rb').read()\n"
        "    except OSError: continue\n"
        "    assert b'TOKEN=no-' + b'one' not in text or b'hororing.hororun' in text, text\n"
        "assert os.environ['TOKEN'] == 'no-' + 'one'\n"
    )
    words = ["-np", "2", "-H", "localhost:1,there:1", "--rsh-agent", str(tmp_path / "rsh")]
    (tmp_path / "rsh").write_text('#!/bin/sh\nshift; exec sh -c "$*"\n')
    (tmp_path / "rsh").chmod(0o755)
    done = run(*words, "-x", "TOKEN=no-one", sys.executable, "-c", rank)
    assert done.returncode == 0, done.stderr


def test_with_mpi_the_mpirun_line_is_printed_and_run(tmp_path: Path):
    fake = tmp_path / "mpirun"
    fake.write_text('#!/bin/sh\necho ran "$@"\nexit 4\n')
    fake.chmod(0o755)
    flags = ["-H", "a:2,b:2", "--mpi", "--autotune-log-file", "y", "-x", "A", "--mpi-args=--v"]
    flags += ["--tcp", "--no-stall-check", "--no-hierarchical-allreduce", "--num-nccl-streams", "3"]
    path = f"{tmp_path}:/usr/bin:/bin"
    outer = {"A": "1", "HOROVOD_FUSION_THRESHOLD": "9", "HORORING_TRANSPORT": "mpi"}
    done = run("-np", "4", *flags, "python", "t.py", PATH=path, **outer)
    settings = "-x HOROVOD_FUSION_THRESHOLD -x HORORING_TRANSPORT=tcp -x A -x HOROVOD_AUTOTUNE=1"
    settings += " -x HOROVOD_HIERARCHICAL_ALLREDUCE=0 -x HOROVOD_NUM_NCCL_STREAMS=3"
    settings += " -x HOROVOD_STALL_CHECK_DISABLE=1"
    words = f"-np 4 -H a:2,b:2 --output tag {settings} --v python t.py"
    assert done.stdout == f"mpirun {words}\nran {words}\n"
    assert done.returncode == 4


def test_info_is_of_one_rank_also_where_hororun_starts_it():  # push tier, 1 s
    told = run("-np", "2", sys.executable, "-m", "hororing", "info")
    assert told.returncode == 0, told
    assert told.stdout.count("works (one process)") == 2
