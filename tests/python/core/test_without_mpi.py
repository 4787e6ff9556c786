"""Jobs without MPI: a rendezvous at a store, and communication by shared memory or TCP.

Push tier, 12 s: a script without a framework, on one host and on two emulated ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import mpirun
import pretend_hosts
import pytest
import tiers

ROOT = Path(__file__).parents[3]
HORORUN = [sys.executable, "-m", "hororing.hororun"]
LIMIT_S = 60.0

# All collectives with small and large tensors, in two engines.
SCRIPT = """
import sys
import numpy as np
import hororing.numpy as hvd

for life in range(2):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for count in (1, 1000, 500_003):
        mine = [np.arange(count, dtype=np.float32) + each for each in range(size)]
        total = hvd.allreduce(mine[rank], op=hvd.Sum, name=f"sum.{count}")
        assert np.array_equal(total, sum(mine)), "sum"
        parts = hvd.allgather(mine[rank][: rank + 1], name=f"gather.{count}")
        assert np.array_equal(parts, np.concatenate([mine[r][: r + 1] for r in range(size)]))
        root = size - 1
        assert np.array_equal(hvd.broadcast(mine[rank], root, name=f"cast.{count}"), mine[root])
    sent = np.array([100 * rank + to for to in range(size)])
    received = hvd.alltoall(sent, name="all")
    received = received[0] if isinstance(received, tuple) else received
    assert received.tolist() == [100 * r + rank for r in range(size)], received
    assert hvd.broadcast_object({"from": rank}, 0) == {"from": 0}
    assert hvd.local_size() == int(sys.argv[1])
    print(f"rank {rank} of {size} is right", flush=True)
    hvd.shutdown()
"""

# Rank 1 dies; the others print the error, and its time after the death.
DEATH = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import hororing.numpy as hvd

hvd.init()
died = Path(sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher, when a rank has failed
try:
    for step in range(100_000):
        hvd.allreduce(np.ones(1000, np.float32), op=hvd.Sum, name="x")
        if step == 50 and hvd.rank() == 1:
            died.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
except Exception as error:
    late = time.time() - float(died.read_text())
    Path(f"{sys.argv[1]}.{hvd.rank()}").write_text(f"{type(error).__name__} {late:.1f} {error}")
"""


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HORORUN, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("transport", "size"),
    [
        ("auto", 3),
        ("tcp", 3),
        pytest.param("auto", 2, marks=tiers.full),
        pytest.param("tcp", 2, marks=tiers.full),
        pytest.param("tcp", 4, marks=tiers.full),
    ],
)
def test_collectives_are_right_on_one_host(transport: str, size: int) -> None:
    job = run(
        "-np", str(size), sys.executable, "-c", SCRIPT, str(size), HORORING_TRANSPORT=transport
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("is right") == 2 * size


# TCP between the hosts, and shared memory within each host.
@pytest.mark.skipif(bool(pretend_hosts.why_not()), reason=pretend_hosts.why_not())
@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=tiers.full)])
def test_collectives_are_right_on_two_hosts(transport: str) -> None:
    command = ["env", *pretend_hosts.variables("a,a,b,b"), sys.executable, "-c", SCRIPT, "2"]
    job = run("-np", "4", *command, HORORING_TRANSPORT=transport)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("is right") == 8


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_survivors_hear_of_a_death(transport: str, tmp_path: Path) -> None:
    died = tmp_path / "died"
    job = run(
        "-np",
        "3",
        "--grace",
        "5",
        sys.executable,
        "-c",
        DEATH,
        str(died),
        HORORING_TRANSPORT=transport,
    )
    assert job.returncode == 128 + 9, job.stderr
    for rank in (0, 2):
        kind, late, text = Path(f"{died}.{rank}").read_text().split(" ", 2)
        assert kind == "PeerLostError", text
        assert "rank 1" in text
        assert float(late) < 5


def by_hand(rank: int, size: int, place: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(size)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HORORING_RANK": str(rank),
            "HORORING_SIZE": str(size),
            "HORORING_RENDEZVOUS": place,
            **more,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_ranks_that_are_started_by_hand_meet_in_a_directory(tmp_path: Path) -> None:
    place = f"file://{tmp_path}"
    ranks = [by_hand(rank, 2, place, HORORING_JOB="one") for rank in range(2)]
    for rank in ranks:
        printed, _ = rank.communicate(timeout=LIMIT_S)
        assert rank.returncode == 0, printed
        assert printed.count("is right") == 2


def test_cores_need_local_ranks(tmp_path: Path) -> None:
    more = {"HORORING_JOB": "cores", "HORORING_CPU": "0,1"}
    ranks = [by_hand(rank, 2, f"file://{tmp_path}", **more) for rank in range(2)]
    for rank in ranks:
        printed, _ = rank.communicate(timeout=LIMIT_S)
        assert "ValueError: init: HORORING_CPU is in order of local rank" in printed


OUTLIVES = """
import os, sys, time
from pathlib import Path
import numpy as np
import hororing.numpy as hvd

shell, here = os.getppid(), Path(sys.argv[1])
hvd.init()
(here / f"ready.{hvd.rank()}").touch()
while os.getppid() == shell:
    time.sleep(0.01)
time.sleep(1)  # the engine looks four times a second
hvd.allreduce(np.ones(1), name="late")
(here / f"done.{hvd.rank()}").touch()
"""


def test_ranks_that_are_started_by_hand_outlive_their_shell(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OUTLIVES)
    start = """
    for rank in 0 1; do HORORING_RANK=$rank "$0" train.py . & done
    while [ ! -e ready.0 ] || [ ! -e ready.1 ]; do sleep 0.1; done
    """
    place = {"HORORING_SIZE": "2", "HORORING_RENDEZVOUS": f"file://{tmp_path}"}
    with Path(tmp_path / "errors").open("w") as errors:
        subprocess.run(
            ["sh", "-c", start, sys.executable], cwd=tmp_path, timeout=LIMIT_S, check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HORORING_JOB": "hand", **place},
            stderr=errors,
        )  # fmt: skip
    end = time.monotonic() + LIMIT_S
    while len(list(tmp_path.glob("done.*"))) < 2:
        assert time.monotonic() < end, (tmp_path / "errors").read_text()
        time.sleep(0.1)


# Like torch.multiprocessing.spawn and the launchers of notebooks.
SPAWNS = """
import multiprocessing, os

def rank(number):
    os.environ["HORORING_RANK"] = str(number)
    import hororing.numpy as hvd
    hvd.init()
    assert hvd.allgather_object(hvd.rank()) == [0, 1]
    print("is right", flush=True)

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=rank, args=(n,)) for n in (0, 1)]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
"""


def test_workers_of_multiprocessing_may_be_ranks_of_their_own(tmp_path: Path) -> None:
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS)
    job = subprocess.run(
        [sys.executable, str(script)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HORORING_SIZE": "2",
            "HORORING_JOB": "three",
            "HORORING_RENDEZVOUS": f"file://{tmp_path}",
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert job.stdout.count("is right") == 2, job.stderr


def test_one_rank_is_one_whatever_started_its_launcher() -> None:
    outer = {"JOB_COMPLETION_INDEX": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
    job = run("-np", "1", sys.executable, "-c", SCRIPT, "1", **outer)
    assert job.returncode == 0, job.stderr


def test_a_rank_that_nobody_joins_ends_in_time(tmp_path: Path) -> None:
    begin = time.monotonic()
    alone = by_hand(0, 2, f"file://{tmp_path}", HORORING_JOB="two", HORORING_TIMEOUT_S="2")
    printed, _ = alone.communicate(timeout=LIMIT_S)
    assert alone.returncode == 1
    assert "TransportError: init: " in printed, printed
    assert "rank 1" in printed
    assert time.monotonic() - begin < 20


@tiers.full
@pytest.mark.skipif(bool(mpirun.why_no_hosts()), reason=mpirun.why_no_hosts())
def test_tcp_under_mpirun_over_two_hosts() -> None:
    job = subprocess.run(
        [
            str(mpirun.HOSTS),
            "2,2",
            "mpirun",
            "-x",
            "PYTHONPATH",
            "-x",
            "HORORING_TRANSPORT",
            sys.executable,
            "-c",
            SCRIPT.replace(" and not hvd.mpi_enabled()", ""),
            "2",
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HORORING_TRANSPORT": "tcp",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("is right") == 8
