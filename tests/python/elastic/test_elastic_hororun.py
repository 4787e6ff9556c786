"""hororun with jobs that survive the end of processes. Push tier, 15 s."""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import mpirun
import nemesis
import pytest
import tiers
from hororun_jobs import DEADLINE_S, is_alive, line, numbers, replace, run, sh, wait_until
from nemesis import ElasticRun, disturb, kill

from hororing._job.rendezvous.generations import Member, World
from hororing.hororun.command import main
from hororing.hororun.flags.host_lists import Host
from hororing.hororun.host.output import Output
from hororing.hororun.job import discovery, history
from hororing.hororun.job.slots import Slots

# ---------------------------------------------------------------------------------------------
# Parts


def names(slots: Slots, now: float, running: int = 0) -> list[str]:
    return [f"{slot.host}{slot.index}" for slot in slots.due(now, running)]


def test_slots_are_filled_host_after_host_and_rest_longer_after_each_failure():
    slots = Slots(max_np=3)
    assert slots.update([Host("a", 2), Host("b", 2)]) == (["a", "b"], [])
    assert names(slots, 0.0) == ["a0", "a1", "b0"]
    assert names(slots, 0.0, running=2) == ["a0"]
    first = slots.due(0.0, 0)[0]
    rests = [slots.failed(first, 100.0, early=False) for _ in range(12)]
    assert rests[:5] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert rests[-1] == 60.0
    assert not first.retired
    assert names(slots, 159.0) == ["a1", "b0", "b1"]  # another one takes its place
    assert slots.next_at(159.0, 0) == 160.0
    assert slots.next_at(159.0, 3) is None
    assert slots.failed(first, 160.0, early=False, lived_s=61.0) == 0.0


def test_a_slot_whose_processes_never_take_part_is_retired():
    slots = Slots(max_np=2)
    slots.update([Host("a", 2)])
    first, second = slots.due(0.0, 0)
    for early in (True, True, False, True, True):
        slots.failed(first, 0.0, early=early)
    assert slots.usable() == 2
    slots.failed(first, 0.0, early=True)
    assert (first.retired, second.retired, slots.usable()) == (True, False, 1)
    assert names(slots, 1e9) == ["a1"]


def test_a_cooldown_range_is_the_users_and_gives_nothing_up():
    slots = Slots(max_np=1, cooldown=(2.0, 20.0), random=Random(1))
    slots.update([Host("a", 1)])
    (slot,) = slots.due(0.0, 0)
    rests = [slots.failed(slot, 0.0, early=True) for _ in range(5)]
    assert 2.0 <= rests[0] <= 4.0 <= rests[1] <= 6.0 <= 8.0 <= rests[2] <= 10.0
    assert rests[4] == 20.0
    assert slots.usable() == 1


def test_hosts_come_and_go_and_slots_that_stay_keep_their_past():
    slots = Slots(max_np=9)
    slots.update([Host("a", 1)])
    slots.failed(slots.of("a")[0], 5.0, early=False)
    slots.failed(slots.of("a")[0], 5.0, early=False)
    assert slots.update([Host("b", 1), Host("a", 2)]) == (["b"], [])
    assert names(slots, 5.0) == ["b0", "a1"]
    assert slots.update([Host("b", 0)]) == ([], ["a"])
    assert slots.usable() == 0
    slots.update([Host("b", 2)])
    slots.of("b")[1].busy = True  # by a process that does not end with its slot
    slots.update([Host("b", 1)])
    assert (names(slots, 5.0), slots.usable()) == (["b0"], 1)
    slots.update([Host("b", 3)])
    assert names(slots, 5.0) == ["b0", "b2"]


def test_the_script_prints_hosts_with_or_without_slots():
    assert discovery.parse("a:2\n\n b \n", 4) == [Host("a", 2), Host("b", 4)]
    assert discovery.parse("a:2\n[fd00::1]:1\na\n", 4) == [Host("a", 3), Host("fd00::1", 1)]
    assert discovery.parse("", None) == []
    for text, wanted in (
        ("a\n", "a has no number of slots: print host:slots, or give --slots-per-host"),
        ("-l:1", "'-l' begins with '-'"),
        ("a 2", "'a 2' is not understood"),
    ):
        with pytest.raises(ValueError, match=wanted):
            discovery.parse(text, None)


def test_a_generation_that_cannot_be_recorded_is_logged():
    logged: list[str] = []
    world = World(2, (Member("0" * 16, "host", 1, 7, 0),))
    history.record(Path("/dev/full"), world, "start", logged.append)
    assert logged == [
        "ERROR: cannot write /dev/full: No space left on device; it lacks a generation"
    ]


def test_an_empty_list_must_come_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(discovery, "EVERY_S", 0.0)
    hosts = tmp_path / "hosts"
    found: list[list[Host]] = []
    with selectors.DefaultSelector() as selector:
        script = discovery.Discovery(
            selector, ["cat", str(hosts)], None, found=found.append, failed=pytest.fail
        )
        for text, wanted in (
            ("a:1", 1),
            ("", 1),
            ("", 2),
            ("", 3),
            ("a:1", 4),
            ("", 4),
            ("a:1", 5),
        ):
            hosts.write_text(text)
            script.go_on()
            for key, _ in selector.select(60):
                key.data()
            assert len(found) == wanted
            assert found[-1] == ([Host("a", 1)] if text or wanted in (1, 4) else [])
        script.close()


def test_lines_have_the_rank_of_their_process_where_there_is_one():
    class Kept:
        text = b""

        def write(self, data: bytes) -> int:
            self.text += data
            return len(data)

    out = Kept()
    output = Output({"stdout": out}, 2, tag=True, only_from={1}, elastic=True)  # type: ignore[dict-item]
    output.write(4, "stdout", b"a\n")
    output.ranks = {4: 1, 5: 0}
    output.write(4, "stdout", b"b\n")
    output.write(5, "stdout", b"c\n")
    assert out.text == b"[1] b\n"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--min-np 3 -np 2", "--min-np 3, -np 2, --max-np 2: they must ascend"),
        ("--max-np 3", "--max-np: how many ranks at the start? Give -np N"),
        ("-np 2 --slots-per-host 2", "--slots-per-host is for elastic jobs: give --min-np N, too"),
        ("-np 2 --reset-limit 3", "--reset-limit is for elastic jobs: give --min-np N, too"),
        ("-np 2 --min-num-proc 1 --numa-aware", "--numa-aware cannot be combined with --min-np"),
        ("-np 2 --max-num-proc 4 --mpi", "--mpi cannot be combined with --max-np"),
        ("-np 3 --min-np 1 -H localhost:2", "-np 3: the hosts have 2 slots"),
        ("-np 2 --max-np 3 -H localhost:2", "--max-np 3: the hosts have 2 slots; give them more"),
        ("-np 1 --host-discovery-script a -H b:1", "lists the hosts: give no others"),
        ('-np 1 --host-discovery-script "a \'b"', "No closing quotation"),
        ("-np 1 --min-np 1 --blacklist-cooldown-range 3 2", "they must ascend from above 0"),
        ("-np 1 --min-np 1 --elastic-timeout soon", "'soon' is not understood"),
    ],
)
def test_flags_that_do_not_fit_are_an_error(
    words: str, wanted: str, capfd: pytest.CaptureFixture[str]
):
    import shlex

    with pytest.raises(SystemExit) as end:
        main([*shlex.split(words), "/bin/sh"])
    assert end.value.code == 2
    assert wanted in capfd.readouterr().err


# ---------------------------------------------------------------------------------------------
# Processes that are not ranks: /bin/sh


def test_a_script_that_fails_everywhere_is_not_started_for_ever():
    done = run("-np", "2", "--min-np", "1", *sh("echo no >&2; exit 3"))
    assert done.returncode == 3, done.stderr
    assert "every process has failed before the first generation" in done.stderr
    assert done.stderr.count("] no\n") <= 4
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"hororun: process [01] has failed with exit code 3", last)


def test_a_slot_that_fails_is_given_up_and_too_few_end_the_job():
    script = "[ $HORORING_PROCESS = 0 ] && sleep 600; kill -8 $$"
    done = run("-np", "2", "--min-np", "2", *sh(script))
    assert done.returncode == 128 + 8, done.stderr
    killed = re.findall(r"hororun: \d\d:\d\d:\d\d process \d was killed by SIGFPE", done.stderr)
    assert len(killed) == 3
    assert "process 2 starts in place of process 1" in done.stderr
    assert "its slot is no longer used" in done.stderr
    assert "the job has failed: there are 1 usable slots, of at least 2" in done.stderr
    assert "3 of 4 processes have failed (process 1, process 2, process 3)" in done.stderr


def test_a_program_that_is_no_rank_ends_well_and_knows_no_rank():
    shown = "env | grep -E '^(HORORING_|RANK|OMP)'"
    done = run("-np", "1", "--min-np", "1", *sh(shown), HORORING_RANK="7", HORORING_SIZE="9")
    assert done.returncode == 0, done.stderr
    for variable in ("ELASTIC=1", "PROCESS=0", "SECRET_FD=", "JOB=", "RENDEZVOUS=127.0.0.1:"):
        assert f"HORORING_{variable}" in done.stdout
    assert "RANK=" not in done.stdout
    assert "SIZE=" not in done.stdout


def test_programs_that_are_no_ranks_all_end_by_themselves():  # push tier, 1 s
    script = "[ $HORORING_PROCESS = 0 ] || sleep 0.5; echo done"
    done = run("-np", "2", "--min-np", "2", *sh(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done\n") == 2
    done = run("-np", "2", "--min-np", "1", *sh("exit $HORORING_PROCESS"))
    assert done.returncode == 1, done.stderr


def test_a_process_that_ends_before_init_fails_the_job_of_those_that_do_not():  # push tier, 1 s
    script = (
        "import os, sys, time\n"
        "if os.environ['HORORING_PROCESS'] == '0': sys.exit()\n"
        "time.sleep(0.5)\n"
        "import hororing.numpy as hvd; hvd.init(); print('here')"
    )
    done = run("-np", "2", "--min-np", "1", sys.executable, "-c", script)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "the job has failed: process 0 has ended without calling init()" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_job_and_start_nothing(
    number: int, started: Callable[..., subprocess.Popen[str]]
):
    job = started("-np", "2", "--min-np", "1", *sh("echo pid=$$; exec sleep 600"))
    pids = numbers(line(job) + line(job))
    job.send_signal(number)
    out, errors = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 128 + number
    assert out == ""
    assert f"ended by {signal.Signals(number).name}" in errors
    assert not any(is_alive(pid) for pid in pids)


def test_processes_and_their_children_die_with_hororun_even_if_it_is_killed(
    started: Callable[..., subprocess.Popen[str]],
):
    # The killed process has left a child, which ends before the slot is used again.
    script = "sleep 600 & echo pid=$! pid=$$; wait"
    job = started("-np", "1", "--min-np", "1", "--no-tag-output", *sh(script))
    child, parent = numbers(line(job))
    os.kill(parent, signal.SIGKILL)
    again = numbers(line(job))
    wait_until(lambda: not is_alive(child))
    job.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in again))


def test_the_script_tells_the_hosts(tmp_path: Path, started: Callable[..., subprocess.Popen[str]]):
    # The script reports one slot, then an error, then more slots.
    script = tmp_path / "script"
    script.write_text(
        f"cd {tmp_path}; echo >> times; case $(wc -l < times) in 1) echo localhost:1;; "
        "2) echo oh >&2; exit 7;; *) echo localhost:9;; esac"
    )
    job = started(
        "-np", "1", "--max-np", "2", "--host-discovery-script", f"sh {script}",
        *sh("echo process=$HORORING_PROCESS=; exec sleep 600"),
    )  # fmt: skip
    assert "process=0=" in line(job)
    assert "process=1=" in line(job)
    job.terminate()
    _, errors = job.communicate(timeout=DEADLINE_S)
    assert f"--host-discovery-script sh {script}: exit code 7: oh" in errors


def test_a_script_that_fails_at_first_is_an_error():
    done = run("-np", "1", "--host-discovery-script", "false", *sh("echo here"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "hororun: --host-discovery-script false: exit code 1" in done.stderr


@pytest.mark.parametrize(
    ("script", "limit_s", "wanted"),
    [
        ("echo localhost:1,127.0.0.1:1", 60.0, "localhost and 127.0.0.1 are both this host"),
        ("sleep 600", 0.2, "sleep 600: it took longer than 0.2 s"),
    ],
)
def test_a_script_that_misleads_is_an_error(
    script: str,
    limit_s: float,
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(discovery, "_LONGEST_S", limit_s)
    assert main(["-np", "2", "--host-discovery-script", script, *sh("echo here")]) == 1
    assert wanted in capfd.readouterr().err


def test_too_few_hosts_are_waited_for_and_not_for_ever():
    done = run(
        "-np", "2", "--host-discovery-script", "echo localhost:1", "--elastic-timeout", "0.3",
        *sh("echo here"),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert "1 usable slots, of at least 2 that are needed, for 0.3 s" in done.stderr


# ---------------------------------------------------------------------------------------------
# Ranks


def test_a_job_goes_on_when_rank_0_and_then_the_last_one_are_killed():  # push tier, 4 s
    with ElasticRun(3) as job:
        generation = job.wait_until_it_works()
        for rank in (0, 2):
            hit = job.pid(rank)
            kill(hit)
            generation = job.wait_until_it_works(after=generation, without=[hit])
        job.end()
        told = job.told()
        assert "process 4 has arrived" in told
        assert "2 of 5 processes have failed" in told


def test_hosts_that_are_taken_away_end_well(tmp_path: Path):  # push tier, 8 s
    hosts, rsh = tmp_path / "hosts", tmp_path / "rsh"
    rsh.write_text(f'#!/bin/sh\nshift\n{nemesis.MARK}="${nemesis.MARK}" exec sh -c "$*"\n')
    rsh.chmod(0o755)
    hosts.write_text("localhost:1\nother:1\n")
    flags = ["--host-discovery-script", f"cat {hosts}", "--rsh-agent", str(rsh)]
    with ElasticRun(2, flags) as job:
        generation = job.wait_until_it_works()
        told = {each["host"] for each in job.worlds()[-1]["members"]}
        assert told == {socket.gethostname(), "other"}
        replace(hosts, "localhost:1\n")
        generation = job.wait_until_it_works(1, after=generation)
        job.wait(lambda: len(nemesis.ranks(job)) == 1, "the other one does not end")
        assert job.worlds()[-1]["cause"] == "host other was removed"
        # The same for slots: never more processes than there are.
        replace(hosts, "localhost:2\n")
        generation = job.wait_until_it_works(2, after=generation)
        replace(hosts, "localhost:1\n")
        generation = job.wait_until_it_works(1, after=generation)
        job.wait(lambda: len(nemesis.ranks(job)) == 1, "the process of the slot does not end")
        assert job.worlds()[-1]["cause"] == "the slot of process 2 was removed"
        job.size = 1
        job.end()
        assert "processes have failed" not in job.told()


def test_a_reset_limit_ends_the_job():  # push tier, 2 s
    with ElasticRun(2, ["--reset-limit", "1"]) as job:
        job.wait_until_it_works()
        # A kill may cost only one generation, if the new process is faster than the others.
        while job.hororun.poll() is None:
            hit = job.pid(1)
            kill(hit)
            job.wait(
                lambda hit=hit: job.hororun.poll() is not None or job.works(2, 0, [hit]),
                "it does not end",
            )
        assert job.hororun.returncode == 128 + signal.SIGKILL
        assert "more than 1 resets (--reset-limit)" in job.told()


def test_an_exit_code_of_0_alone_is_no_success():  # push tier, 1 s
    script = "import os, hororing.numpy as hvd; hvd.init(); os._exit(0)"
    done = run("-np", "1", "--min-np", "1", sys.executable, "-c", script)
    assert done.returncode == 1, done.stderr
    assert "process 0 (rank 0) has ended without finishing" in done.stderr
    assert "no process is left that has the state of the training" in done.stderr


def test_a_script_that_is_not_written_for_it_learns_what_it_lacks():  # push tier, 1 s
    script = (
        "import os, signal, numpy as np, hororing.numpy as hvd; hvd.init(); hvd.barrier()\n"
        "if hvd.rank(): os.kill(os.getpid(), signal.SIGKILL)\n"
        "hvd.allreduce(np.ones(1))"
    )
    done = run("-np", "2", "--min-np", "1", sys.executable, "-c", script)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert "a script goes on in a function of hvd.elastic.run (docs/elastic.md)" in done.stderr


@tiers.full
@pytest.mark.parametrize("how", ["raise SystemExit(3)", "sys.excepthook = print; 1 / 0"])
def test_who_fails_in_an_unusual_way_is_replaced(how: str, tmp_path: Path):  # full tier, 5 s
    script = (
        "import os, sys, numpy as np, hororing.numpy as hvd\n"
        "from hororing import elastic\n"
        "hvd.init()\n"
        "state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0, sizes=[])\n"
        "@elastic.run\n"
        "def train(state):\n"
        "    while state.sizes[-5:] != [2] * 5 or len(state.sizes) < 20 or 1 not in state.sizes:\n"
        "        state.sizes.append(int(hvd.allreduce(np.array(1), op=hvd.Sum, name='one')))\n"
        "        state.commit()\n"
        "        if len(state.sizes) == 5 and os.environ['HORORING_PROCESS'] == '1':\n"
        f"            {how}\n"
        "train(state)\n"
        "print('finished with', hvd.size(), flush=True)"
    )
    words = ["-np", "2", "--min-np", "1", "--max-np", "2", sys.executable, "-c", script]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished with 2") == 2
    assert "process 2 starts" in done.stderr


def test_who_fails_when_others_have_finished_fails_the_job():  # push tier, 1 s
    script = (
        "import os, sys, time, numpy as np, hororing.numpy as hvd\n"
        "hvd.init(); rank = hvd.rank(); pids = hvd.allgather(np.array([os.getpid()]))\n"
        "hvd.shutdown()\n"
        "while rank == 1 and os.path.exists(f'/proc/{pids[0]}'): time.sleep(0.01)\n"
        "sys.exit(5 * rank)"
    )
    done = run("-np", "2", "--min-np", "1", sys.executable, "-c", script)
    assert done.returncode == 5, done.stderr
    assert "a process has failed after another one had finished" in done.stderr
    assert "starts" not in done.stderr


@tiers.full
@pytest.mark.parametrize("event", nemesis.EVENTS)
def test_the_job_survives(event: str):  # full tier, 10 s each
    rng = Random(event)
    with ElasticRun(3) as job:
        job.wait_until_it_works()
        for _ in range(3):
            disturb(job, event, rng)
        job.end()


@tiers.full
def test_the_benchmark_runs():  # full tier, 5 s
    script = nemesis.ROOT / "benchmarks" / "elastic.py"
    done = subprocess.run(
        [sys.executable, script, "--quick", "--ranks", "3", "--floats", "1000"],
        capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [each.split()[0] for each in done.stdout.splitlines()]
    assert told[:3] == ["error", "generation", "step"]


@tiers.full
@pytest.mark.parametrize("seed", range(3))
def test_nemesis(seed: int):  # full tier, 2 minutes each
    done = nemesis.nemesis(3 + seed % 2, f"test.{seed}", time.monotonic() + 110)
    assert sum(done.values()) > 3


@tiers.full
@pytest.mark.skipif(bool(mpirun.why_no_hosts()), reason=mpirun.why_no_hosts())
@pytest.mark.parametrize("seed", range(2))
def test_nemesis_between_hosts(seed: int):  # full tier, 2 minutes each
    done = nemesis.nemesis(3 + seed, f"hosts.{seed}", time.monotonic() + 110, 3 + seed)
    assert sum(done.values()) > 3


@tiers.full
def test_nemesis_with_torch():  # full tier, 1 minute
    pytest.importorskip("torch")
    done = nemesis.nemesis(3, "torch", time.monotonic() + 50, script=nemesis.TORCH_RANKS)
    assert sum(done.values()) > 1


@tiers.full
@pytest.mark.skipif(bool(mpirun.why_no_hosts()), reason=mpirun.why_no_hosts())
@pytest.mark.parametrize("event", ["kill agent", "stop agent", "cut", "slow", "part"])
def test_the_job_survives_between_hosts(event: str):  # full tier, 15 s each
    rng = Random(event)
    with ElasticRun(3, hosts=3) as job:
        job.wait_until_it_works()
        assert set(job.hosts()) == {"host0", "host1", "host2"}
        for _ in range(2):
            disturb(job, event, rng)
        job.end()


@tiers.full
def test_a_killed_hororun_takes_a_stopped_rank_along():  # full tier, 3 s
    with ElasticRun(2) as job:
        job.wait_until_it_works()
        kill(job.pid(1), signal.SIGSTOP)
        job.hororun.kill()
        job.hororun.wait()
        wait_until(lambda: not nemesis.ranks(job))
