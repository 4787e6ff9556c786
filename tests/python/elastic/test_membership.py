"""Elastic jobs of real processes without a launcher: deaths, newcomers, ends. Push tier, 15 s."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import tiers
from elastic_ranks import DEADLINE_S, TRAIN, ElasticJob

from hororing._job.rendezvous.generations import Done, Joined


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_survivors_go_on_in_the_same_processes_and_a_newcomer_joins(tmp_path: Path, transport: str):
    stop = tmp_path / "stop"
    with ElasticJob(np=3, max_np=3) as job:
        job.begin(3, str(stop), HORORING_TRANSPORT=transport)
        # Rank 0 is not special.
        rest = job.kill(0)
        assert job.lost()[0].rank == 0
        for each in rest:
            assert "error PeerLostError 0" in job.lines[each]
        # Members agree to stop for the newcomer, without an error.
        new = job.start(str(stop), HORORING_TRANSPORT=transport)
        job.wait(lambda: all(job.started(each, 3) for each in [*rest, new]))
        assert sum(line.startswith("error") for each in rest for line in job.lines[each]) == 2
        stop.touch()
        ends = job.ends(*rest, new)
        assert len(set(ends)) == 1, ends
        assert [world.generation for world in job.worlds()] == [1, 2, 3]
        members = job.worlds()[-1].members
        assert members[0].step > 0
        assert members[2].pid == job.ranks[new].pid
        assert members[2].step == 0
        job.wait(lambda: sum(isinstance(event, Done) for event in job.events) == 3)
        assert sum(isinstance(event, Joined) for event in job.events) == 4


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_stopped_process_is_declared_lost_and_comes_back_as_a_newcomer(
    tmp_path: Path, transport: str
):
    """Its connections stay open, so only its silence shows that it is lost."""
    stop = tmp_path / "stop"
    with ElasticJob(np=3, max_np=3, peer_timeout_s=2.0) as job:
        job.begin(3, str(stop), HORORING_TRANSPORT=transport)
        last = job.process_of(2)
        uid = job.worlds()[0].members[2].uid
        job.ranks[last].send_signal(signal.SIGSTOP)
        rest = sorted({0, 1, 2} - {last})
        job.wait(lambda: all(job.started(each, 2) for each in rest))
        assert job.lost()[0].rank == 2
        assert "no sign of life" in job.lost()[0].why
        job.ranks[last].send_signal(signal.SIGCONT)
        # In its old generation it gets an error; in the next one it is a new member.
        job.wait(lambda: any(line.startswith("error") for line in job.lines[last]))
        job.wait(lambda: len(job.worlds()[-1].members) == 3 and len(job.worlds()) > 2)
        members = job.worlds()[-1].members
        assert uid not in [each.uid for each in members]
        assert job.ranks[last].pid in [each.pid for each in members]
        stop.touch()
        assert len(set(job.ends(*rest, last))) == 1


def test_the_end_of_the_store_ends_the_job(tmp_path: Path):
    with ElasticJob(np=2, min_np=2) as job:
        job.begin(2, str(tmp_path / "stop"))
        job.store.stop()
        for each in range(2):
            job.wait(lambda each=each: "error TransportError" in job.lines[each])


def test_a_process_whose_host_was_taken_away_ends_without_an_error(tmp_path: Path):
    stop = tmp_path / "stop"
    with ElasticJob(np=3) as job:
        for host in ("kept", "kept", "gone"):
            job.start(str(stop), HORORING_HOSTNAME=host)
        job.wait(lambda: all(job.started(each, 1) for each in range(3)))
        assert [each.host for each in job.worlds()[0].members].count("kept") == 2
        job.store.retire("gone")
        job.store.hosts_updated(removed=["gone"])
        assert job.ranks[2].wait(DEADLINE_S) == 0
        job.wait(lambda: all(job.started(each, 2) for each in range(2)))
        stop.touch()
        assert len(set(job.ends(0, 1))) == 1
        assert job.lost() == []


def test_a_second_death_while_a_generation_forms(tmp_path: Path):
    stop = tmp_path / "stop"
    with ElasticJob(np=3) as job:
        job.begin(3, str(stop))
        job.ranks[0].kill()
        job.wait(
            lambda: any(line.startswith("error") for each in (1, 2) for line in job.lines[each])
        )
        job.ranks[1].kill()
        job.wait(lambda: any(len(world.members) == 1 for world in job.worlds()))
        stop.touch()
        job.ends(2)


# Like TRAIN, but a process dies on request in the second generation, with a rank but no peers yet.
DIES_ON_ITS_WAY = """
import os, signal, sys
from hororing._engine import membership; from hororing._api import init as runtime

exchange = runtime._exchange

def dies(*how):
    if membership.generation() == 2 and os.environ.get("DIES"):
        os.kill(os.getpid(), signal.SIGKILL)
    return exchange(*how)

runtime._exchange = dies
"""


def test_a_death_on_the_way_into_a_generation_is_no_error_of_the_script(tmp_path: Path):
    stop = tmp_path / "stop"
    with ElasticJob(np=3) as job:
        for dies in ("", "", "1"):
            job.start(str(stop), script=DIES_ON_ITS_WAY + TRAIN, DIES=dies)
        job.wait(lambda: all(job.started(each, 1) for each in range(3)))
        job.ranks[0].kill()
        job.wait(lambda: job.started(1, 3))
        assert not job.started(1, 2)
        assert [len(world.members) for world in job.worlds()] == [3, 2, 1]
        stop.touch()
        job.ends(1)


def test_a_process_that_waits_for_others_can_be_interrupted(tmp_path: Path):
    with ElasticJob(np=2) as job:
        job.start(str(tmp_path / "stop"))
        job.wait(lambda: job.store._requests)  # the process waits
        job.ranks[0].send_signal(signal.SIGINT)
        assert job.ranks[0].wait(DEADLINE_S) != 0
        job.wait(job.lost)


RESTARTS = """
import gc, os, sys, threading
import numpy as np
import hororing.numpy as hvd
from hororing._engine import membership

def held():
    gc.collect()
    with open("/proc/self/status") as file:
        told = dict(line.split(":", 1) for line in file)
    return (len(os.listdir("/proc/self/fd")), int(told["Threads"]), int(told["VmRSS"].split()[0]))

counts = []
for number in range(int(sys.argv[1]) + 1):
    hvd.init()
    assert hvd.allreduce(np.full(5000, 1.0), op=hvd.Sum)[0] == hvd.size()
    assert membership.generation() == number + 1
    if number == 5:  # a child has no part in it, and can end
        child = os.fork()
        if child == 0:
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        hvd.allreduce(np.ones(1))
    hvd.shutdown()  # of all: the first one ends the others' engines
    if number in (10, int(sys.argv[1])):
        counts.append(held())
(files, threads, kilobytes), (files_then, threads_then, kilobytes_then) = counts
assert files_then <= files, counts
assert threads_then <= threads, counts
# Histories of generations are kept: 1 KB for each of them.
assert kilobytes_then - kilobytes < 4096 + 4 * int(sys.argv[1]), counts
print("end", flush=True)
"""


@pytest.mark.parametrize(
    ("restarts", "transport"),
    tiers.choose([(40, "shm"), (1000, "shm"), (1000, "tcp")], push=[(40, "shm")]),
)
def test_generations_leave_nothing_behind(restarts: int, transport: str):
    with ElasticJob(np=3) as job:
        segments = set(os.listdir("/dev/shm"))
        for _ in range(3):
            job.start(str(restarts), script=RESTARTS, HORORING_TRANSPORT=transport)
        job.ends(0, 1, 2)
        assert len(job.worlds()) == restarts + 1
        assert not [
            name for name in set(os.listdir("/dev/shm")) - segments if str(job.ranks[0].pid) in name
        ]
