"""Jobs across several emulated hosts (hosts.sh): the collectives against the oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mpirun
import numpy as np
import oracle
import pytest
import tiers
from live_job import LiveJob, poll

import hororing.numpy as hvd
from hororing._requests.arguments import Average, Sum

Array = oracle.Array

# Ranks per host; "by node": rank 0 on the first host, 1 on the second, and so on. The third layout
# uses the flat algorithms, and so does the last, whose links are so slow that messages are short.
LAYOUTS = ["2,2", "1,2", "2,2 by node", "2,1 by node", "1,1,1 at 500mbit"]
RANKS = Path(__file__).parents[1] / "support/ending_ranks.py"
# Without it, Open MPI ends jobs across hosts when a connection breaks.
ULFM = ["--with-ft", "ulfm"]
TRANSPORTS = ["mpi", "tcp"]


def arrays(dtype: str, shape: tuple[int, ...], *key: int) -> list[Array]:
    """Return the inputs of all ranks."""
    return [
        oracle.values(np.random.default_rng([mpirun.seed(), rank, *key]), dtype, shape)
        for rank in range(hvd.size())
    ]


def check_equal_on_all_ranks(result: Array) -> None:
    everybody = hvd.allgather_object(result.tobytes(), name="bits")
    assert all(bits == everybody[0] for bits in everybody), "ranks hold different bits"


# ---------------------------------------------------------------------------------------------
# On the ranks


def case_the_layout_is_that_of_the_hosts() -> None:
    hvd.init()
    layout = [int(ranks) for ranks in os.environ["TEST_LAYOUT"].split(",")]
    name = os.uname().nodename
    host = int(name.removeprefix("host"))
    assert hvd.size() == sum(layout)
    assert hvd.local_size() == layout[host]
    assert hvd.is_homogeneous() is (len(set(layout)) == 1)
    names = hvd.allgather_object(name)
    wanted = [f"host{k}" for k, ranks in enumerate(layout) for _ in range(ranks)]
    interleaved = "TEST_INTERLEAVED" in os.environ
    assert names == ((["host0", "host1"] * 2)[: len(names)] if interleaved else wanted)
    assert hvd.local_rank() == names[: hvd.rank()].count(name)


def case_allreduce_of_every_size() -> None:
    for dtype in ("float32", "float16", "int32"):
        for elements in (0, 1, 3, 1009, 30_011, 400_009, 1 << 20):
            passed = arrays(dtype, (elements,), elements)
            op = Sum if dtype == "int32" else Average
            result = hvd.allreduce(passed[hvd.rank()], op=op, name=f"{dtype} {elements}")
            oracle.reduced(passed, op, 1.0, 1.0).compare(result)
            check_equal_on_all_ranks(result)


def case_allreduce_with_factors_and_many_tensors_at_once() -> None:
    shapes = [(7,), (33, 1000), (0, 3), (250_003,), (1,)]
    passed = [arrays("float32", shape, index) for index, shape in enumerate(shapes)]
    mine = [of_ranks[hvd.rank()].copy() for of_ranks in passed]
    results = hvd.grouped_allreduce(
        mine, op=Sum, prescale_factor=0.5, postscale_factor=3.0, name="many"
    )
    for of_ranks, result in zip(passed, results, strict=True):
        oracle.reduced(of_ranks, Sum, 0.5, 3.0).compare(result)
        check_equal_on_all_ranks(result)


def case_the_other_collectives() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = [np.full((place + 1, 1000), place, np.float32) for place in range(size)]
    oracle.equal(hvd.allgather(rows[rank], name="gather"), np.concatenate(rows))
    for root in range(size):
        passed = arrays("float64", (70_001,), root)
        result = hvd.broadcast(passed[rank], root_rank=root, name=f"broadcast {root}")
        oracle.equal(result, passed[root])
    passed = arrays("float32", (4 * size + 1, 300), 77)
    first, last = oracle.share(4 * size + 1, size, rank)
    oracle.reduced(passed, Sum, 1.0, 1.0).rows(first, last).compare(
        hvd.reducescatter(passed[rank], op=Sum, name="scatter")
    )
    passed = arrays("int64", (3 * size, 500), 78)
    received, _ = oracle.exchanged(passed, [None] * size, rank)
    result = hvd.alltoall(passed[rank], name="exchange")
    oracle.equal(result[0] if isinstance(result, tuple) else result, received)
    hvd.barrier()


def case_a_set_of_one_rank_per_host() -> None:
    names = hvd.allgather_object(os.uname().nodename)
    leaders = sorted({names.index(name) for name in names})[:2]
    chosen = hvd.add_process_set(leaders)
    passed = arrays("float32", (50_000,), 5)
    if chosen.included():
        result = hvd.allreduce(passed[hvd.rank()], op=Sum, name="leaders", process_set=chosen)
        oracle.reduced([passed[rank] for rank in leaders], Sum, 1.0, 1.0).compare(result)
    hvd.remove_process_set(chosen)
    hvd.shutdown()


# ---------------------------------------------------------------------------------------------
# The tests

needs_hosts = pytest.mark.skipif(bool(mpirun.why_no_hosts()), reason=mpirun.why_no_hosts())


@needs_hosts
@pytest.mark.timeout(mpirun.CASES_LIMIT_S + 20)
@pytest.mark.parametrize("case", mpirun.case_names(globals()))
@pytest.mark.parametrize(
    ("by", "layout"),
    tiers.choose(
        [(by, layout) for by in TRANSPORTS for layout in LAYOUTS],
        push=[("tcp", "1,2"), ("mpi", "2,2 by node")],
    ),
)
def test_across_hosts(case: str, by: str, layout: str) -> None:
    hosts, _, rate = layout.partition(" at ")
    hosts, _, interleaved = hosts.partition(" by ")
    size = sum(map(int, hosts.split(",")))
    variables = {
        "TEST_LAYOUT": hosts,
        "HORORING_DYNAMIC_PROCESS_SETS": "1",
        "HORORING_TRANSPORT": by,
    }
    if interleaved:
        variables["TEST_INTERLEAVED"] = "1"
        variables["PRTE_MCA_rmaps_default_mapping_policy"] = "node:oversubscribe"
        if hosts == "2,2":
            variables["HORORING_BACKEND"] = "host"
    limited = f"{hosts} -r {rate}" if rate else hosts
    mpirun.cases_of(__file__, size, limited, **variables).check(case)


@needs_hosts
@pytest.mark.parametrize(
    ("victim", "by"),
    tiers.choose([(r, by) for r in (1, 3) for by in TRANSPORTS], push=[(3, "tcp"), (1, "tcp")]),
)
def test_a_rank_that_dies_is_noticed_on_its_host_and_on_the_others(victim: int, by: str) -> None:
    with LiveJob(
        RANKS,
        4,
        "die_in_a_large_allreduce",
        str(victim),
        options=ULFM,
        hosts="2,2",
        HORORING_TRANSPORT=by,
    ) as job:
        # TCP knows only the connection of a rank.
        process = f" (pid {job.said(victim, 'pid')})" if by == "mpi" else ""
        died = f"allreduce 'large' (REDUCE): rank {victim}{process} died"
        for rank in set(range(4)) - {victim}:
            failure = json.loads(job.said(rank, "failed"))
            assert failure["text"].startswith(died), failure
            assert failure["kind"] == "PeerLostError", failure
            assert failure["rank"] == victim, failure
            assert failure["seconds"] < 20
        job.end()


# The first or the second host is cut off.
CUTS = [
    (by, cut, doing, time_)
    for by in TRANSPORTS
    for cut in (0, 1)
    for doing in ("reduce_until_it_fails", "compute_then_reduce")
    for time_ in range(10)
]


@needs_hosts
@pytest.mark.parametrize(
    ("by", "cut", "doing", "time_"),
    tiers.choose(
        CUTS,
        push=[
            ("mpi", 0, "reduce_until_it_fails", 0),
            ("mpi", 1, "compute_then_reduce", 0),
            ("tcp", 0, "reduce_until_it_fails", 0),
        ],
    ),
)
def test_both_sides_of_a_cut_network_end_at_the_time_limit(
    tmp_path: Path, by: str, cut: int, doing: str, time_: int
) -> None:
    limit = 8  # which holds for init, too
    environ = {"HORORING_TIMEOUT_S": str(limit), "HORORING_TRANSPORT": by}
    with LiveJob(RANKS, 3, doing, str(tmp_path), hosts="1,2", **environ) as job:
        computes = doing == "compute_then_reduce"
        job.wait_until_all_say("ready" if computes else "working")
        inside = ["nsenter", "-t", str(job.pid(cut)), "--net"]
        subprocess.run([*inside, "ip", "link", "set", "eth0", "down"], check=True)
        (tmp_path / "cut").touch()
        for rank in range(3):
            failure = json.loads(job.said(rank, "failed"))
            # The kernel may give up a connection of TCP first, after the same time.
            lost = by == "tcp" and "cannot be reached any more" in failure["text"]
            assert failure["kind"] == "TransportError" or lost, failure
            assert failure["seconds"] < 2 * limit - 0.5, failure


@needs_hosts
def test_a_host_without_shared_memory_is_slower_and_says_so(tmp_path: Path) -> None:
    script = tmp_path / "sum.py"
    script.write_text(
        "import numpy as np, hororing.numpy as hvd\n"
        "hvd.init()\n"
        "print(hvd.allreduce(np.ones(1 << 18), op=hvd.Sum)[-1])\n"
    )
    job = mpirun.run(script, 4, hosts="2,2 -s 12m")
    assert job.returncode == 0, job.report()
    for text in job.outputs:
        assert "ranks of one host talk through TCP" in text, job.report()
        assert "cannot reserve" in text, job.report()
        assert text.splitlines()[-1] == "4.0", job.report()


@needs_hosts
def test_hosts_end_with_the_script_that_made_them(tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text(
        "import json, os, sys, time\n"
        "spaces = os.readlink('/proc/self/ns/net'), os.readlink('/proc/self/ns/mnt')\n"
        "print(json.dumps(spaces), flush=True)\ntime.sleep(1000)\n"
    )
    process = subprocess.Popen(
        [mpirun.HOSTS, "1,1", "mpirun", sys.executable, script],
        env={**os.environ, **mpirun.launch_environment(str(tmp_path))},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    spaces = [json.loads(process.stdout.readline()) for _ in range(2)]
    assert spaces[0][0] != spaces[1][0]
    process.kill()
    process.wait()

    def users() -> list[Path]:
        found = []
        for link in Path("/proc").glob("[0-9]*/ns/net"):
            try:
                if os.readlink(link) in {space[0] for space in spaces}:
                    found.append(link)
            except OSError:
                continue
        return found

    assert poll(lambda: not users()), users()
