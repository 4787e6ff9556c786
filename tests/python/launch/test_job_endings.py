"""How jobs end: killed, stopped, interrupted, by an exception, early, silently.

In all cases no process and no file in shared memory is left, and the other ranks get an error with
the reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import tiers
from live_job import SHM, LiveJob, poll

RANKS = Path(__file__).parents[1] / "support/ending_ranks.py"

# mpirun does not end the survivors of a dead rank, so that they can report even on a busy machine.
PATIENT = ["--runtime-options", "recoverable"]
TRANSPORTS = ["auto", "mpi", "tcp"]


def failure(job: LiveJob, rank: int) -> dict:
    return json.loads(job.said(rank, "failed"))


def check_end(job: LiveJob, *, failed: bool = True) -> int:
    code = job.end()
    assert (code != 0) is failed, f"mpirun's exit code is {code}\n{job.report()}"
    assert job.files_left() == set()
    return code


# ---------------------------------------------------------------------------------------------
# Killed


@pytest.mark.parametrize("size", tiers.choose([2, 4], push=[4]))
def test_a_killed_rank_is_named_to_the_others_within_seconds(size: int):
    with LiveJob(RANKS, size, "die_idle", options=PATIENT) as job:
        job.wait_until_all_say("ready")
        victim = job.pid(size - 1)
        os.kill(victim, signal.SIGKILL)
        for rank in range(size - 1):
            seen = failure(job, rank)
            assert (seen["kind"], seen["rank"]) == ("PeerLostError", size - 1)
            assert f"rank {size - 1} (pid {victim}) died" in seen["text"]
            assert "allreduce 'x'" in seen["text"]
            assert seen["seconds"] < 20
        check_end(job)


@pytest.mark.parametrize("size", tiers.choose([2, 4], push=[4]))
def test_a_rank_killed_in_a_large_allreduce_is_named_to_the_others(size: int):
    with LiveJob(RANKS, size, "die_in_a_large_allreduce", options=PATIENT) as job:
        for rank in range(size - 1):
            seen = failure(job, rank)
            assert (seen["kind"], seen["rank"]) == ("PeerLostError", size - 1), seen
            assert "allreduce 'large' (REDUCE): " in seen["text"]
            assert seen["seconds"] < 20
        check_end(job)


# mpirun does not end survivors, and MPI tells them of a death.
ULFM = ["--with-ft", "ulfm", "--mca", "coll", "^han"]


@pytest.mark.parametrize(
    ("transport", "options"),
    tiers.choose(
        [*((transport, PATIENT) for transport in TRANSPORTS), ("mpi", ULFM)], push=[("mpi", ULFM)]
    ),
)
def test_who_ends_because_of_a_death_is_not_taken_for_the_dead(transport: str, options: list[str]):
    environ = {"HORORING_TRANSPORT": transport}
    if options is ULFM:  # otherwise a lost connection ends Open MPI
        environ["OMPI_MCA_btl"] = "self,tcp"
    with LiveJob(RANKS, 3, "die_one_after_the_other", options=options, **environ) as job:
        job.wait_until_all_say("ready")
        os.kill(job.pid(1), signal.SIGSTOP)  # when it resumes, it finds two dead ranks
        os.kill(job.pid(2), signal.SIGKILL)
        assert failure(job, 0)["rank"] == 2
        assert poll(lambda: not Path(f"/proc/{job.pid(0)}").exists())
        os.kill(job.pid(1), signal.SIGCONT)
        seen = failure(job, 1)
        assert (seen["kind"], seen["rank"]) == ("PeerLostError", 2), seen
        job.end()


@pytest.mark.parametrize("size", tiers.choose([2, 4], push=[2]))
@pytest.mark.parametrize("transport", tiers.choose(TRANSPORTS, push=["auto"]))
@pytest.mark.parametrize("how", ["die_idle", "die_in_a_large_allreduce"])
def test_mpirun_ends_a_job_that_has_lost_a_rank(size: int, transport: str, how: str):
    with LiveJob(RANKS, size, how, HORORING_TRANSPORT=transport) as job:
        if how == "die_idle":
            job.wait_until_all_say("ready")
            os.kill(job.pid(size - 1), signal.SIGKILL)
        check_end(job)


@pytest.mark.parametrize("size", tiers.choose([2, 4], push=[2]))
def test_a_rank_killed_before_init_ends_the_job(size: int):
    with LiveJob(RANKS, size, "die_before_init") as job:
        check_end(job)
        assert "initialised" not in job.report()


def test_a_death_that_nobody_waited_for_is_told_by_the_next_verb(tmp_path: Path):
    arguments = ("die_while_others_compute", str(tmp_path))
    with LiveJob(RANKS, 2, *arguments, options=PATIENT) as job:
        job.wait_until_all_say("ready")
        os.kill(job.pid(1), signal.SIGKILL)
        assert poll(lambda: job.pid(1) not in job.alive())
        (tmp_path / "dead").touch()
        seen = failure(job, 0)
        assert (seen["kind"], seen["rank"]) == ("PeerLostError", 1)
        check_end(job)


@pytest.mark.parametrize("kills", tiers.choose([4, 20], push=[4]))
def test_whoever_is_killed_whenever_leaves_nothing(kills: int):
    seed = random.randrange(1 << 32)
    print("seed", seed)  # shown in a failure
    choice = random.Random(seed)
    for _ in range(kills):
        size = choice.randint(2, 4)
        victims = choice.sample(range(size), choice.randint(1, size))
        with LiveJob(RANKS, size, "work") as job:
            job.wait_until_all_say("working")
            pids = [job.pid(rank) for rank in victims]
            time.sleep(choice.random() * 0.02)  # so that the kill comes at a random point
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            check_end(job)


# ---------------------------------------------------------------------------------------------
# Signals


DOING = [(4, "work"), (2, "wait_in_vain"), (2, "compute"), (2, "compute_alone")]


@pytest.mark.parametrize(
    ("size", "doing", "how"),
    tiers.choose(
        [(*doing, how) for doing in DOING for how in (signal.SIGINT, signal.SIGTERM)],
        push=[(*doing, (signal.SIGINT, signal.SIGTERM)[at % 2]) for at, doing in enumerate(DOING)],
    ),
)
def test_a_signal_to_mpirun_ends_everything(size: int, doing: str, how: int):
    with LiveJob(RANKS, size, doing) as job:
        job.wait_until_all_say("working")
        os.kill(job.launcher.pid, how)
        check_end(job)


def test_an_interrupted_rank_answers_while_it_waits_and_tells_the_others():
    with LiveJob(RANKS, 2, "wait_in_vain", options=PATIENT) as job:
        job.wait_until_all_say("working")
        os.kill(job.pid(0), signal.SIGINT)
        job.said(0, "interrupted")
        seen = failure(job, 1)
        assert (seen["kind"], seen["rank"]) == ("PeerLostError", 0)
        assert "KeyboardInterrupt" in seen["text"]
        check_end(job)


@pytest.mark.parametrize("doing", ["work", "wait_in_vain", "compute"])
def test_ranks_end_by_themselves_when_mpirun_is_killed(doing: str):
    with LiveJob(RANKS, 2, doing) as job:
        job.wait_until_all_say("working")
        os.kill(job.launcher.pid, signal.SIGKILL)
        job.end()
        # A killed mpirun does not remove its own files.
        assert job.files_left(of_mpi=False) == set()


# ---------------------------------------------------------------------------------------------
# By itself


@pytest.mark.parametrize("size", tiers.choose([2, 4], push=[4]))
@pytest.mark.parametrize("how", ["end_without_shutdown", "end_at_different_times"])
def test_a_script_that_does_not_shut_down_ends_quietly(size: int, how: str):
    with LiveJob(RANKS, size, how) as job:
        assert check_end(job, failed=False) == 0
        printed = [job.printed(rank) for rank in range(size)]
        assert [*printed, (job.out / "launcher.out").read_text()] == [""] * (size + 1)
        # files_left does not count the files of other jobs.
        left = [SHM / f"hororing.{pid}.left" for pid in ("1", (job.out / "0.pid").read_text())]
        with contextlib.ExitStack() as files:
            for path in left:
                # Without a lock, the next job on this machine would remove it.
                fcntl.flock(files.enter_context(path.open("w")), fcntl.LOCK_EX)
                files.callback(path.unlink)
            assert job.files_left(timeout_s=0) == {left[1].name}


def test_the_exit_code_of_one_rank_is_in_the_text_and_that_of_mpirun():
    with LiveJob(RANKS, 2, "exit_3", "exit()", options=PATIENT) as job:
        seen = failure(job, 0)
        assert seen["kind"] == "ShutDownError"
        assert "rank 1 has shut down (the script has ended by sys.exit(3))" in seen["text"]
        check_end(job)
    # In the last case the others compute, and the job ends all the same.
    for size, how in ((1, "exit()"), (2, "sys.exit()"), (2, "sys.exit() while others compute")):
        with LiveJob(RANKS, size, "exit_3", how) as job:
            assert check_end(job) == 3


def test_an_exit_that_the_script_catches_is_none():
    with LiveJob(RANKS, 2, "exit_3", "caught", options=PATIENT) as job:
        assert "rank 1 has shut down (the script has ended)" in failure(job, 0)["text"]
        check_end(job)


@pytest.mark.parametrize("size", tiers.choose([2, 4], push=[4]))
def test_the_text_of_an_uncaught_exception_reaches_every_rank(size: int):
    with LiveJob(RANKS, size, "raise_an_exception", options=PATIENT) as job:
        for rank in range(size - 1):
            seen = failure(job, rank)
            assert (seen["kind"], seen["rank"]) == ("PeerLostError", size - 1)
            assert "OverflowError: the loss is 7.5e99, größer geht es nicht" in seen["text"]
            assert f"rank {size - 1}" in seen["text"]
            assert seen["seconds"] < 20
        check_end(job)
        assert "OverflowError: the loss is 7.5e99" in job.printed(size - 1)


@pytest.mark.parametrize(
    ("how", "kind", "why"),
    [
        ("ValueError", "PeerLostError", "shutdown() was called while handling ValueError: bad "),
        ("exit", "ShutDownError", "the script has ended by sys.exit(3)"),
    ],
)
def test_a_shutdown_in_finally_does_not_hide_why(how: str, kind: str, why: str):
    with LiveJob(RANKS, 2, "shut_down_in_finally", how, options=PATIENT) as job:
        seen = failure(job, 0)
        assert seen["kind"] == kind
        assert f"rank 1 has shut down ({why}" in seen["text"]
        assert ("fewer batches" in seen["text"]) == (kind == "ShutDownError")
        check_end(job)


def test_an_exception_that_cannot_be_shown_has_a_name_at_least():
    with LiveJob(RANKS, 2, "raise_without_text", options=PATIENT) as job:
        seen = failure(job, 0)
        assert (seen["kind"], seen["rank"]) == ("PeerLostError", 1)
        assert "BrokenError" in seen["text"]
        check_end(job)


@pytest.mark.parametrize("size", tiers.choose([2, 3], push=[3]))
def test_an_early_end_of_one_rank_is_a_shut_down_to_the_others(size: int):
    with LiveJob(RANKS, size, "end_early", str(size)) as job:
        assert check_end(job, failed=False) == 0
        for rank in range(size - 1):
            lines = [line for line in job.printed(rank).splitlines() if line.startswith("failed")]
            seen = [json.loads(line.partition(" ")[2]) for line in lines]
            assert [each["kind"] for each in seen] == ["ShutDownError"] * 2
            assert f"rank {size - 1}" in seen[0]["text"]
            assert "the script has ended" in seen[0]["text"]
            assert max(each["seconds"] for each in seen) < 20


def test_shutdown_in_one_rank_is_told_to_the_others():
    with LiveJob(RANKS, 2, "shut_down_early", options=PATIENT) as job:
        seen = failure(job, 0)
        assert seen["kind"] == "ShutDownError"
        assert "rank 1" in seen["text"]
        assert "shutdown() was called" in seen["text"]
        job.said(1, "not")
        check_end(job)


# ---------------------------------------------------------------------------------------------
# Stopped


@pytest.mark.parametrize("transport", tiers.choose(TRANSPORTS, push=["auto", "mpi"]))
def test_a_stopped_rank_is_named_at_the_time_limit(transport: str):
    environ = {
        "HORORING_TIMEOUT_S": "8",  # which holds for init, too
        "HORORING_STALL_WARNING_S": "1",
        "HORORING_TRANSPORT": transport,
    }
    with LiveJob(RANKS, 3, "stop_in_a_large_allreduce", options=PATIENT, **environ) as job:
        for rank in range(2):
            # Either rank may notice it first; over MPI, rank 0 waits for rank 1, in a ring.
            seen = failure(job, rank)
            assert seen["kind"] == "TransportError", seen
            assert "allreduce 'large' (REDUCE): no progress from rank(s) 2 for" in seen["text"]
            assert 7.5 < seen["seconds"] < 30
            warning = "stall: allreduce 'large' (REDUCE): no progress from rank(s) 2 for "
            assert warning in job.printed(rank), job.report()
        check_end(job)


@pytest.mark.parametrize(
    ("transport", "time_"),
    tiers.choose(
        [(transport, time_) for transport in TRANSPORTS for time_ in range(10)],
        push=[("auto", 0), ("mpi", 0)],
    ),
)
def test_all_others_end_when_rank_0_is_stopped_in_a_loop_of_steps(transport: str, time_: int):
    """At any point: in a batch, or while it negotiates."""
    limit = 8  # which holds for init, too
    environ = {"HORORING_TIMEOUT_S": str(limit), "HORORING_TRANSPORT": transport}
    with LiveJob(RANKS, 3, "reduce_until_it_fails", options=PATIENT, **environ) as job:
        job.wait_until_all_say("working")
        time.sleep(random.random() * 0.02)
        os.kill(job.pid(0), signal.SIGSTOP)
        for rank in (1, 2):
            seen = failure(job, rank)
            assert seen["kind"] == "TransportError", seen
            assert "rank 0 on host" in seen["text"] or "from rank(s) 0 for" in seen["text"], seen
            assert seen["seconds"] < 2 * limit - 0.5, seen
        os.kill(job.pid(0), signal.SIGKILL)
        check_end(job)


@tiers.full
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_job_that_is_suspended_as_a_whole_goes_on(transport: str):
    limit = 2
    environ = {"HORORING_TIMEOUT_S": str(limit), "HORORING_TRANSPORT": transport}
    with LiveJob(RANKS, 3, "reduce_until_it_fails", **environ) as job:
        job.wait_until_all_say("working")
        for time_ in range(3):
            for rank in range(3):
                os.kill(job.pid((rank + time_) % 3), signal.SIGSTOP)
            time.sleep(limit + 1.5)
            for rank in range(3):
                os.kill(job.pid(rank), signal.SIGCONT)
            time.sleep(1)
        assert not any("failed" in job.printed(rank) for rank in range(3)), job.report()


def test_a_stopped_coordinator_is_named_in_a_warning_and_ends_a_stall():
    environ = {"HORORING_STALL_WARNING_S": "1", "HORORING_STALL_SHUTDOWN_S": "2.5"}
    with LiveJob(RANKS, 2, "stop_before_submitting", "0", **environ) as job:
        seen = failure(job, 1)
        assert seen["kind"] == "StalledError", seen
        assert "allreduce 'x': rank 0 on host" in seen["text"]
        assert seen["seconds"] < 30
        warning = f"rank 0 on host {os.uname().nodename}, which coordinates, has given no sign"
        assert f"stall: allreduce 'x': {warning} of life for " in job.printed(1)
        check_end(job)


@pytest.mark.parametrize(
    ("transport", "step"),
    tiers.choose(
        [*((transport, "eager") for transport in TRANSPORTS), ("auto", "graph")],
        push=[("auto", "eager")],
    ),
)
def test_uneven_batches_and_another_collective_are_an_error_on_every_rank(
    transport: str, step: str
):
    if step == "graph":
        pytest.importorskip("tensorflow")
    environ = {"HORORING_DEADLOCK_S": "1", "HORORING_TRANSPORT": transport}
    with LiveJob(RANKS, 3, "uneven_batches", step, **environ) as job:
        for rank in range(3):
            seen = failure(job, rank)
            in_graph = step == "graph" and rank != 1
            assert seen["kind"] == ("DeadlineExceededError" if in_graph else "StalledError"), seen
            for what in ("gradient': submitted by ranks 0,2, missing rank 1", "metric': submitted"):
                assert what in seen["text"], seen
            assert 1 < seen["seconds"] < 30
            assert float(job.said(rank, "shut")) < 3
        job.wait_until_all_say("fine")
        check_end(job, failed=False)


@pytest.mark.parametrize("transport", tiers.choose(TRANSPORTS, push=["auto", "mpi"]))
def test_a_rank_stopped_before_it_submits_is_a_stall(transport: str):
    environ = {
        "HORORING_STALL_WARNING_S": "0.5",
        "HORORING_STALL_SHUTDOWN_S": "1.5",
        "HORORING_TRANSPORT": transport,
    }
    with LiveJob(RANKS, 2, "stop_before_submitting", **environ) as job:
        seen = failure(job, 0)
        assert seen["kind"] == "StalledError", seen
        assert "'x'" in seen["text"]
        assert "rank 1" in seen["text"] or "ranks 1" in seen["text"]
        assert 1 < seen["seconds"] < 30
        assert float(job.said(0, "shut")) < 3  # no rank waits for the stopped one
        check_end(job)


def test_init_ends_at_the_time_limit_when_a_rank_does_not_come():
    pytest.importorskip("mpi4py")
    with LiveJob(RANKS, 2, "never_call_init", HORORING_TIMEOUT_S="2") as job:
        seen = failure(job, 0)
        assert seen["kind"] == "TransportError", seen
        assert 1.5 < seen["seconds"] < 30
        check_end(job)


def test_on_one_host_no_rank_listens_on_the_network():
    with LiveJob(RANKS, 2, "listen_nowhere") as job:
        assert check_end(job, failed=False) == 0
        job.wait_until_all_say("fine")


# ---------------------------------------------------------------------------------------------
# In init


def test_a_rank_that_dies_before_another_init_is_named_by_it():
    with LiveJob(RANKS, 3, "die_between_two_inits", options=ULFM) as job:
        for rank in range(2):
            seen = failure(job, rank)
            assert (seen["kind"], seen["rank"]) == ("PeerLostError", 2), seen
            assert "init: rank 2" in seen["text"]
            assert seen["seconds"] < 20
        check_end(job)


def has_engine(pid: int) -> bool:
    """Whether a process has a thread of the engine."""
    tasks = Path(f"/proc/{pid}/task").glob("*/comm")
    try:
        return any(task.read_text() == "hororing\n" for task in tasks)
    except OSError:  # a thread has just ended
        return False


def test_a_rank_that_dies_while_others_are_in_mpi_init_is_named_to_them():
    with LiveJob(RANKS, 3, "wait_for_one_in_mpi_init", options=ULFM) as job:
        victim = job.pid(2)
        job.wait_until_all_say("pid")
        assert poll(lambda: all(has_engine(job.pid(rank)) for rank in range(2))), job.report()
        time.sleep(1.5)  # until they have checked the others
        os.kill(victim, signal.SIGKILL)
        for rank in range(2):
            seen = failure(job, rank)
            # One of the two may end because of it before the other has noticed.
            assert seen["kind"] == "PeerLostError", seen
            assert seen["text"].startswith("init: ")
            assert f"rank 2 (pid {victim}) ended" in seen["text"]
            assert seen["seconds"] < 30
        check_end(job)


def test_an_interrupt_ends_init_and_leaves_no_engine():
    with LiveJob(RANKS, 2, "wait_for_one_in_mpi_init") as job:
        job.wait_until_all_say("pid")
        assert poll(lambda: has_engine(job.pid(0))), job.report()  # which is about to call MPI_Init
        os.kill(job.pid(0), signal.SIGINT)
        _, initialized, state = job.said(0, "interrupted").split()
        assert (initialized, state) == ("False", "0")
        assert "start this process again" in failure(job, 0)["text"]
        check_end(job)


def test_an_interrupt_anywhere_in_init_leaves_an_engine_that_python_knows_or_none():
    with LiveJob(RANKS, 1, "interrupt_init_everywhere") as job:
        assert check_end(job, failed=False) == 0
        job.said(0, "fine")


# ---------------------------------------------------------------------------------------------
# Children


@pytest.mark.parametrize("how", ["fork", "spawn", "start_scripts"])
def test_children_of_a_rank_do_not_disturb_it_and_have_no_engine(how: str):
    with LiveJob(RANKS, 2, how) as job:
        assert check_end(job, failed=False) == 0
        job.wait_until_all_say("fine")


@pytest.mark.parametrize("how", tiers.choose(["fork", "spawn"], push=["fork"]))
def test_workers_of_a_data_loader_do_not_disturb_a_training(how: str):
    pytest.importorskip("torch")
    with LiveJob(RANKS, 2, "train_with_workers", how) as job:
        job.said(0, "ready")
        assert check_end(job, failed=False) == 0
        job.wait_until_all_say("fine")
