"""Jobs that torchrun, srun, Kubernetes and others start: the rendezvous of their ranks.

Push tier, 13 s: the variables, and one small job of each kind. Full tier, 4 minutes: every way to
start, with 1, 2 and 4 ranks, and over emulated hosts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mpirun
import pytest
import real_slurm
import tiers
import torch

from hororing._job import bootstrap, endpoints, job_settings
from hororing._job.launchers import Launch, detect
from hororing._job.rendezvous import files, offers, torch_store
from hororing._job.rendezvous.client import Member, RendezvousError

ROOT = Path(__file__).parents[3]
LIMIT_S = 200.0  # shorter than the limit of a test
SECRET = "a secret that all ranks know"
SETTINGS = {"ALONE": False, "TIMEOUT_S": 30.0}

TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77", "SLURM_STEP_NUM_NODES": "1", "HOME": "/home/me",
}  # fmt: skip
POD = {"JOB_COMPLETION_INDEX": "1", "HORORING_SIZE": "4", "HORORING_SECRET_KEY": SECRET}
RANKS = {"HORORING_RANK": "1", "HORORING_SIZE": "2", "HORORING_RENDEZVOUS": "localhost:29400"}


def read(environ: Mapping[str, str]) -> job_settings.JobSettings | None:
    return job_settings.read(detect(environ), environ)


# ---------------------------------------------------------------------------------------------
# Variables


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"RANK": "1"}, "RANK=1 is set, but WORLD_SIZE is not"),
        ({"RANK": "1", "WORLD_SIZE": ""}, "RANK=1 is set, but WORLD_SIZE is not"),
        ({"RANK": "1", "WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a number"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK=1 contradicts WORLD_SIZE=1"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set, but RANK is not"),
        ({**TORCH, "RANK": "one"}, "RANK='one' is not a number"),
        ({**TORCH, "RANK": "4"}, "RANK=4 contradicts WORLD_SIZE=4"),
        ({**TORCH, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1 contradicts LOCAL_W"),
        ({**TORCH, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_RANK=2 contradicts RANK=1"),
        ({**TORCH, "LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8 contradicts WORLD_SIZE=4"),
        (
            {**TORCH, "MASTER_ADDR": ""},
            "WORLD_SIZE=4 shows that there are other ranks, but MASTER_ADDR is not",
        ),
        (
            {**TORCH, "MASTER_PORT": ""},
            "WORLD_SIZE=4 shows that there are other ranks, but MASTER_PORT is not",
        ),
        ({**TORCH, "MASTER_PORT": "0"}, "MASTER_PORT='0' is not a port"),
        ({**TORCH, "HORORING_SIZE": "2"}, "HORORING_SIZE=2 contradicts torchrun, which sets 4"),
        ({**TORCH, **RANKS}, "HORORING_SIZE=2 contradicts WORLD_SIZE=4"),
        ({**TORCH, **RANKS, "HORORING_SIZE": "4", "RANK": "3"}, "HORORING_RANK=1 contradicts RANK"),
        ({**SRUN, "SLURM_PROCID": "4"}, "SLURM_PROCID=4 contradicts SLURM_STEP_NUM_TASKS=4"),
        ({**SRUN, "SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set"),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "2", "HOME": ""}, "HOME is not set"),
        ({**SRUN, "HORORING_SIZE": "2"}, "HORORING_SIZE=2 contradicts srun, which sets 4"),
        ({"JOB_COMPLETION_INDEX": "0"}, "is this pod's index, but the number of pods is unknown"),
        ({**POD, "HORORING_SIZE": "1"}, "JOB_COMPLETION_INDEX=1 contradicts HORORING_SIZE=1"),
        ({**POD, "HORORING_SIZE": "two"}, "HORORING_SIZE='two' is not a number"),
        (POD, "does not contain that of pod 0: give the pods the subdomain of a headless service"),
    ],
)
def test_half_of_the_variables_are_an_error_and_no_job_of_one_rank(
    environ: dict[str, str], wanted: str
):
    with pytest.raises(ValueError, match=wanted.replace("(", r"\(")):
        bootstrap.find(detect(environ), SETTINGS, environ)


def test_who_is_alone_by_choice_or_by_its_launcher_needs_nothing():
    for environ in (
        {"RANK": "0", "WORLD_SIZE": "1"},
        {**TORCH, "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"},
        {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"JOB_COMPLETION_INDEX": "0", "HORORING_SIZE": "1"},
        {"LOCAL_RANK": "0"},
    ):
        assert bootstrap.find(detect(environ), SETTINGS, environ) is None
        assert not detect(environ).launched
    for environ in (TORCH, SRUN, POD, {"JOB_COMPLETION_INDEX": "0"}):
        assert bootstrap.find(Launch(), {**SETTINGS, "ALONE": True}, environ) is None


def test_where_ranks_meet(monkeypatch: pytest.MonkeyPatch):
    agent = {**TORCH, "TORCHELASTIC_RUN_ID": "r 1", "TORCHELASTIC_RESTART_COUNT": "2",
             "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    for environ, wanted in (
        (TORCH, endpoints.Place("torch://a:29500", "torchrun", makes_store=True)),
        (agent, endpoints.Place("torch://a:29500", "torchrun.r_1.2")),
        (
            {**agent, "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "fe80::1"},
            endpoints.Place("torch://[fe80::1]:29500", "torchrun.r_1.2", one_host=True),
        ),
        (
            {**TORCH, "MASTER_ADDR": "[fe80::1] ", "MASTER_PORT": " 29500"},
            endpoints.Place("torch://[fe80::1]:29500", "torchrun", makes_store=True),
        ),
        (
            SRUN,
            endpoints.Place(
                f"file:///dev/shm/hororing-{os.geteuid()}",
                "slurm.77.0",
                one_host=True,
                makes_directory=True,
            ),
        ),
    ):
        told = read(environ)
        assert told is not None
        assert told.place == wanted
    told = read({**SRUN, "SLURM_STEP_NUM_NODES": "2", "SLURM_CLUSTER_NAME": "lab"})
    assert told is not None
    assert told.place.rendezvous == "file:///home/me/.hororing"
    assert told.place.job == "slurm.lab.77.0"
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-1.mesh.default.svc.cluster.local")
    told = read(POD)
    assert told is not None
    assert (told.rank, told.size) == (1, 4)
    assert told.place.rendezvous == "train-0.mesh.default.svc.cluster.local:29411"
    assert told.place.job == "train"
    # A user's rendezvous works with every launcher; srun also gives the job a name.
    told = read({**SRUN, "HORORING_RENDEZVOUS": "file:///scratch"})
    assert told is not None
    assert (told.place.rendezvous, told.place.job) == ("file:///scratch", "slurm.77.0")
    told = read({**TORCH, "HORORING_RENDEZVOUS": "b:1", "HORORING_JOB": "mine"})
    assert told is not None
    assert (told.place.rendezvous, told.place.job) == ("b:1", "mine")


def test_an_srun_that_offers_pmix_is_used_without_mpi():
    def none(launcher: str) -> bool:
        return False

    offered = {**SRUN, "PMIX_RANK": "1"}
    assert detect(offered).launcher == "Slurm"
    assert detect(offered, mpi=none) == detect(SRUN)
    mpirun_only = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    assert detect(mpirun_only, mpi=none).launcher == "Open MPI"  # which init refuses


def test_torchrun_counts_before_what_has_started_it():
    agent = {**TORCH, "TORCHELASTIC_RESTART_COUNT": "0"}
    outer = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0", **SRUN}
    assert detect({**agent, **outer}) == detect(TORCH)
    assert detect({**TORCH, **outer}).launcher == "Open MPI"


# ---------------------------------------------------------------------------------------------
# Rendezvous


def test_the_place_of_srun_that_cannot_be_used_is_an_error_with_the_way_out(tmp_path: Path):
    environ = {**SRUN, "SLURM_STEP_NUM_NODES": "2", "HOME": str(tmp_path)}
    (tmp_path / ".hororing").write_text("not a directory")
    for rank in ("0", "1"):
        told = {**environ, "SLURM_PROCID": rank, "SLURM_LOCALID": "0"}
        with pytest.raises(ValueError, match="set HORORING_RENDEZVOUS=file:///directory to one"):
            bootstrap.find(detect(told), {**SETTINGS, "TIMEOUT_S": 0.1}, told)


def test_a_file_is_removed_when_all_are_there(tmp_path: Path):
    zero = files.serve(str(tmp_path), job="j", size=2, timeout_s=30)
    assert len(list(tmp_path.iterdir())) == 1
    one = files.join(str(tmp_path), job="j", rank=1, size=2, timeout_s=30)
    assert list(tmp_path.iterdir()) == []
    again = files.serve(str(tmp_path), job="j", size=2, timeout_s=30)  # another start
    for member in (one, zero):
        member.done()
    assert len(list(tmp_path.iterdir())) == 1
    again.done()
    assert list(tmp_path.iterdir()) == []


class Board:
    """Keeps the offers of successive starts, even old ones."""

    def __init__(self) -> None:
        self.offer: offers.Offer | None = None

    def make(self) -> Member:
        return offers.make(self.publish, lambda: None, job="j", size=2, timeout_s=30, one_host=True)

    def publish(self, offer: offers.Offer) -> None:
        self.offer = offer

    def accept(self, timeout_s: float = 30) -> Member:
        return offers.accept(
            lambda: (self.offer, "nothing there"), rank=1, size=2, timeout_s=timeout_s
        )


@pytest.mark.parametrize("ends", ["done", "close"])
def test_a_rank_of_the_next_start_waits_until_rank_0_of_the_last_has_ended(ends: str):
    board = Board()
    zero, one = board.make(), board.accept()
    getattr(one, ends)()  # by the first of two programs, or by a restart of torchrun
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(board.accept)
        time.sleep(0.2)
        assert not waits.done()
        zero.close()
        zero = board.make()
        one = waits.result(30)
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(one.share, "1", 30)
        assert zero.share("0", 30) == theirs.result() == ["0", "1"]
    one.done()
    zero.done()


def test_who_claims_the_rank_of_another_is_told_at_once():
    board = Board()
    zero, one = board.make(), board.accept()
    with pytest.raises(RendezvousError, match="claims the rank of rank 1"):
        board.accept()
    one.done()
    zero.done()


def test_a_secret_of_the_users_is_not_left_anywhere():
    board = Board()
    with ThreadPoolExecutor(1) as pool:
        zero = offers.make(
            board.publish, lambda: None, job="j", size=2, timeout_s=30, secret=SECRET.encode()
        )
        assert board.offer is not None
        assert board.offer["secret"] == ""
        waits = pool.submit(
            offers.accept, lambda: (board.offer, ""), rank=1, size=2, timeout_s=30,
            secret=SECRET.encode(),
        )  # fmt: skip
        one = waits.result()
    one.done()
    zero.done()


def test_torchs_store_holds_no_secret_of_ranks_on_one_host(monkeypatch: pytest.MonkeyPatch):
    port = free_port()
    store = torch.distributed.TCPStore("localhost", port, is_master=True)
    offered = []
    publish = torch_store._Board.publish

    def noted(board: Any, offer: Any) -> Any:
        offered.append(offer["secret"])
        return publish(board, offer)

    monkeypatch.setattr(torch_store._Board, "publish", noted)
    inner = torch.distributed.PrefixStore("a", torch.distributed.PrefixStore("b", store))
    secret = bootstrap.secret_at_torch(torch_store.host_of(inner), one_host=False)
    environ = {
        **TORCH, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": socket.gethostname(),
        "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip

    def by_torchrun(rank: int) -> Member | None:
        told = {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        return bootstrap.find(detect(told), SETTINGS, told)

    def by_torch_distributed(rank: int) -> Member:
        return torch_store.meet_in(inner, rank=rank, size=2, timeout_s=30, secret=secret)

    with ThreadPoolExecutor(2) as pool:
        for meet in (by_torchrun, by_torch_distributed):
            for member in reversed(list(pool.map(meet, range(2)))):
                assert member is not None
                member.done()
    assert offered == ["", ""]


@pytest.mark.parametrize("rank", [0, 1])
def test_torchs_store_that_says_nothing_is_an_error_in_time(
    rank: int, monkeypatch: pytest.MonkeyPatch
):
    """The agent may be stopped; torch itself would wait forever."""
    monkeypatch.setattr(torch_store, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listens:
        address = f"127.0.0.1:{listens.getsockname()[1]}"
        wanted = rf"torch's store at {address} .*no answer"
        with pytest.raises(RendezvousError, match=wanted):
            torch_store.meet(address, job="j", rank=rank, size=2, timeout_s=0.5)


@pytest.mark.parametrize("agent", [True, False])
def test_nothing_of_the_meeting_is_left_in_torchs_store(agent: bool):
    port = free_port()
    store = torch.distributed.TCPStore("localhost", port, is_master=True) if agent else None

    def meet(rank: int) -> Member:
        return torch_store.meet(
            f"localhost:{port}", job="j", rank=rank, size=2, timeout_s=30, one_host=True,
            makes_store=not agent,
        )  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):  # as after a restart
            members = list(pool.map(meet, range(2)))
            assert members[0].job == members[1].job != "j"
            if store is not None:
                assert not store.check([torch_store._KEY])
            else:
                socket.create_server(("localhost", port)).close()
            for member in reversed(members):
                member.done()


# ---------------------------------------------------------------------------------------------
# Jobs. Every rank prints its rank and the sum of all ranks.

SCRIPT = """
import json, os, sys
import numpy as np
import hororing.numpy as hvd
from hororing._engine.recorder import _Own

def torch_sums():
    import torch, torch.distributed as dist
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [dist.get_world_size()] * 3

if "torch first" in sys.argv:
    torch_sums()
hvd.init()
total = hvd.allreduce(np.full(1000, 1.0 + hvd.rank(), np.float32), op=hvd.Sum, name="x")
told = {
    "rank": hvd.rank(), "size": hvd.size(), "local": [hvd.local_rank(), hvd.local_size()],
    "sum": float(total[7]), "job": _Own.facts["job"],
}
sys.stdout.write(f"RANK {json.dumps(told)}\\n")
sys.stdout.flush()
if "torch" in sys.argv:
    torch_sums()
if "fails" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and hvd.rank() == 1:
    os._exit(3)
hvd.barrier()
"""

Process = tuple[Sequence[str], Mapping[str, str]]  # a command, and its variables
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def plain() -> dict[str, str]:
    """Return the environment without the variables of launchers."""
    sets = ("HORORING_", "OMPI_COMM", "PMIX_", "PMI_", "SLURM_", "TORCHELASTIC_", "_HORORING_")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(sets)}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**kept, **mpirun.LAUNCH_ENVIRONMENT, "PYTHONPATH": paths}


def free_port() -> int:
    """Return a free port outside the kernel's range of ephemeral ports; the next is free, too."""
    while True:
        number = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError):
            for each in (number, number + 1):
                with socket.socket() as probe:
                    probe.bind(("", each))
            return number


def outputs(processes: Sequence[Process]) -> str:
    """Start processes together; return their output. All must exit with 0."""
    started = [
        subprocess.Popen(
            ["timeout", "-k", "5", str(LIMIT_S), *command], env={**plain(), **variables},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for command, variables in processes
    ]  # fmt: skip
    with ThreadPoolExecutor(len(started)) as pool:
        text = "\n".join(pool.map(lambda each: each.communicate()[0], started))
    assert all(each.returncode == 0 for each in started), text
    return text


def check_ranks(text: str, size: int, per_host: int | None = None, starts_: int = 1) -> None:
    """Fail unless every rank occurs once per start, with the sum of all."""
    found = sorted(
        (json.loads(line.partition("RANK ")[2]) for line in text.splitlines() if "RANK {" in line),
        key=lambda each: int(each["rank"]),
    )
    per_host = per_host or size
    assert [each["rank"] for each in found] == sorted([*range(size)] * starts_), text
    for each in found:
        assert each["size"] == size
        assert each["sum"] == sum(range(1, size + 1))
        assert each["local"] == [each["rank"] % per_host, per_host], text
    assert len({each["job"] for each in found}) == starts_, text
    assert size == 1 or all(each["job"] for each in found)


def of_each(size: int, script: Sequence[str], variables: Callable[[int], Mapping[str, str]]):
    return [([sys.executable, *script], variables(rank)) for rank in range(size)]


def torch_variables(size: int, script: Sequence[str], folder: Path) -> list[Process]:
    port = str(free_port())
    return of_each(size, script, lambda rank: {
        "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    })  # fmt: skip


def slurm_variables(
    size: int, script: Sequence[str], folder: Path, nodes: int = 1
) -> list[Process]:
    number = str(random.SystemRandom().randrange(10**9))
    return of_each(size, script, lambda rank: {
        "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_ID": "0",
        "SLURM_LOCALID": str(rank), "SLURM_JOB_ID": number, "SLURM_NTASKS": "64",
        "SLURM_STEP_NUM_NODES": str(nodes), "HOME": str(folder),
    })  # fmt: skip


def slurm_variables_of_two_nodes(size: int, script: Sequence[str], folder: Path) -> list[Process]:
    return slurm_variables(size, script, folder, 2)


def pod_variables(size: int, script: Sequence[str], folder: Path) -> list[Process]:
    place = f"{socket.gethostname()}:{free_port()}"
    return of_each(size, script, lambda rank: {
        "JOB_COMPLETION_INDEX": str(rank), "HORORING_SIZE": str(size),
        "HORORING_RENDEZVOUS": place, "HORORING_SECRET_KEY": SECRET,
    })  # fmt: skip


def hand(size: int, script: Sequence[str], folder: Path) -> list[Process]:
    place = f"localhost:{free_port()}"
    return of_each(size, script, lambda rank: {
        "HORORING_RANK": str(rank), "HORORING_SIZE": str(size), "HORORING_RENDEZVOUS": place,
    })  # fmt: skip


def directory(size: int, script: Sequence[str], folder: Path) -> list[Process]:
    return of_each(size, script, lambda rank: {
        "HORORING_RANK": str(rank), "HORORING_SIZE": str(size), "HORORING_JOB": "a",
        "HORORING_RENDEZVOUS": f"file://{folder}",
    })  # fmt: skip


def by_mpirun(size: int, script: Sequence[str], folder: Path) -> list[Process]:
    return [(["mpirun", "-np", str(size), sys.executable, *script], {"TMPDIR": str(folder)})]


def hororun(size: int, script: Sequence[str], folder: Path) -> list[Process]:
    words = ["-m", "hororing.hororun", "-np", str(size), "--no-tag-output"]
    return [([sys.executable, *words, sys.executable, *script], {})]


def torchrun(size: int, script: Sequence[str], folder: Path) -> list[Process]:
    return [([*TORCHRUN, "--standalone", "--nproc-per-node", str(size), *script], {})]


def torchrun_whose_rank_0_has_the_store(
    size: int, script: Sequence[str], folder: Path
) -> list[Process]:
    [(command, _)] = torchrun(size, script, folder)
    return [(command, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})]


def torchrun_of_two_nodes(size: int, script: Sequence[str], folder: Path) -> list[Process]:
    """Return two nodes on one machine, with torch's dynamic rendezvous."""
    if size == 1:
        return torchrun(size, script, folder)
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"]
    words = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", str(size // 2), "--rdzv-id", "a"]
    return [([*words, *place, *script], {})] * 2


def torchrun_static(size: int, script: Sequence[str], folder: Path) -> list[Process]:
    """Return two nodes with torch's static rendezvous."""
    nodes = min(size, 2)
    words = ["--nnodes", str(nodes), "--nproc-per-node", str(size // nodes)]
    words += ["--master-addr", "localhost", "--master-port", str(free_port())]
    return [([*TORCHRUN, "--node-rank", str(n), *words, *script], {}) for n in range(nodes)]


def accelerate(size: int, script: Sequence[str], folder: Path) -> list[Process]:
    words = "--num_machines 1 --mixed_precision no --dynamo_backend no --num_processes"
    start = [sys.executable, "-m", "accelerate.commands.launch", *words.split(), str(size)]
    start.append("--multi_gpu" if size > 1 else "--cpu")
    return [([*start, "--main_process_port", str(free_port()), *script], {})]


def lacks(program: str) -> Any:
    there = shutil.which(program) or importlib.util.find_spec(program)
    return pytest.mark.skipif(not there, reason=f"there is no {program}")


WAYS = [
    hororun, torchrun, torchrun_whose_rank_0_has_the_store, torchrun_of_two_nodes,
    torchrun_static, torch_variables, slurm_variables, slurm_variables_of_two_nodes,
    pod_variables, hand, directory,
    pytest.param(by_mpirun, marks=lacks("mpirun")),
    pytest.param(accelerate, marks=lacks("accelerate")),
]  # fmt: skip


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize("way", [torchrun, slurm_variables, pod_variables])
def test_a_job_of_two_ranks(way: Callable[..., list[Process]], script: str, tmp_path: Path):
    check_ranks(outputs(way(2, [script], tmp_path)), 2)


@tiers.full
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_start(
    way: Callable[..., list[Process]], size: int, script: str, tmp_path: Path
):
    check_ranks(outputs(way(size, [script], tmp_path)), size)
    assert [path.name for path in tmp_path.rglob("hororing-*")] == []


@tiers.full
@pytest.mark.parametrize("order", ["torch", "torch first"])
@pytest.mark.parametrize(
    "way", [torchrun, torchrun_whose_rank_0_has_the_store, torch_variables, hororun]
)
def test_torch_distributed_works_beside_us(
    way: Callable[..., list[Process]], order: str, script: str, tmp_path: Path
):
    check_ranks(outputs(way(2, [script, order], tmp_path)), 2)


@tiers.full
@pytest.mark.parametrize("way", [torchrun, torchrun_of_two_nodes])
def test_torchrun_restarts_a_job(way: Callable[..., list[Process]], script: str, tmp_path: Path):
    found = []
    for command, variables in way(2, [script, "fails"], tmp_path):
        at = command.index(script)
        found.append(([*command[:at], "--max-restarts", "2", *command[at:]], variables))
    check_ranks(outputs(found), 2, starts_=2)


@tiers.full
def test_pods_that_are_restarted_after_a_failure_are_a_new_job(script: str, tmp_path: Path):
    """Rank 1's pod restarts first, while rank 0's still ends with PeerLostError."""
    lives = (
        f"TORCHELASTIC_RESTART_COUNT=0 {sys.executable} {script} fails; "
        f"[ $? != 0 ] && TORCHELASTIC_RESTART_COUNT=1 exec {sys.executable} {script} fails"
    )
    processes = [(["bash", "-c", lives], said) for _, said in pod_variables(2, [script], tmp_path)]
    text = outputs(processes)
    assert text.count("RANK {") == 4, text
    assert "PeerLostError" in text


def test_the_manifest_for_kubernetes_is_consistent():
    text = (ROOT / "examples/clusters/kubernetes.yaml").read_text()
    service, job = text.split("---\n")

    def values(field: str, part: str = job) -> list[str]:
        return re.findall(rf'^[ -]*{field}: "?([^\s"]+)', part, re.MULTILINE)

    assert "clusterIP: None" in service
    assert values("name", service) == values("subdomain") == values("job-name", service)
    assert values("completionMode") == ["Indexed"]
    size = job.partition("- name: HORORING_SIZE\n")[2]
    assert values("completions") == values("parallelism") == values("value", size)[:1] == ["4"]
    secret = Path(values("value", job.partition("- name: HORORING_SECRET_FILE\n")[2])[0])
    assert values("mountPath") == [str(secret.parent)]
    assert f"--from-literal={secret.name}=" in service
    assert f"create secret generic {values('secretName')[0]} " in service


@tiers.full
def test_programs_one_after_the_other_are_a_job_each(script: str, tmp_path: Path):
    twice = f"{sys.executable} {script} && exec {sys.executable} {script}"
    for way in (slurm_variables, slurm_variables_of_two_nodes, torch_variables, pod_variables):
        processes = [(["bash", "-c", twice], said) for _, said in way(2, [script], tmp_path)]
        text = outputs(processes)
        assert text.count("RANK {") == 4, text


@tiers.full
@pytest.mark.skipif(bool(real_slurm.why_not()), reason=real_slurm.why_not())
def test_srun(script: str, tmp_path: Path):
    with real_slurm.cluster(tmp_path, free_port()) as (srun, variables):
        for size in (1, 2, 4):
            command = [srun, "-n", str(size), "--overcommit", sys.executable, script]
            check_ranks(outputs([(command, variables)]), size)
        # A PMI of srun that this MPI does not support.
        wrong = [srun, "--mpi=pmi2", "-n", "2", "--overcommit", sys.executable, script]
        done = subprocess.run(
            ["timeout", str(LIMIT_S), *wrong], env={**plain(), **variables}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert "ValueError: init: the launcher started 2 processes or more" in done.stderr
        assert "srun --mpi=none" in done.stderr
        # As a launcher of torchrun.
        command = [srun, "-n", "1", *torchrun(2, [script], tmp_path)[0][0]]
        check_ranks(outputs([(command, variables)]), 2)


# hosts.sh starts this on the first host: a command for each host, with variables per process.
ON_HOSTS = """#!/bin/bash
on() {{ local host=$1; shift; "$PRTE_MCA_plm_ssh_agent" "$host" "env PYTHONPATH='{path}' $*"; }}
{lines}
failed=0; for each in $(jobs -p); do wait $each || failed=$?; done
exit $failed
"""


def on_hosts(tmp_path: Path, lines: Sequence[str]) -> str:
    starter = tmp_path / "starter"
    text = "\n".join(f"{line} &" for line in lines)
    starter.write_text(ON_HOSTS.format(path=ROOT, lines=text))
    starter.chmod(0o755)
    return outputs([([str(mpirun.HOSTS), "2,2", str(starter)], {})])


@tiers.full
@pytest.mark.skipif(bool(mpirun.why_no_hosts()), reason=mpirun.why_no_hosts())
@pytest.mark.parametrize("way", ["hororun", "torchrun", "dynamic torchrun", "srun", "pods"])
def test_over_hosts_with_networks_of_their_own(way: str, script: str, tmp_path: Path):
    python = f"{sys.executable} {script}"
    if way == "hororun":
        agent = '--rsh-agent "$PRTE_MCA_plm_ssh_agent" --no-tag-output -x PYTHONPATH'
        lines = [f"{sys.executable} -m hororing.hororun -H host0:2,host1:2 {agent} {python}"]
    elif way == "torchrun":
        how = "--nnodes 2 --nproc-per-node 2 --master-addr host0 --master-port 29500"
        lines = [
            f"on host{host} {' '.join(TORCHRUN)} --node-rank {host} {how} {script}"
            for host in (0, 1)
        ]
    elif way == "dynamic torchrun":
        how = "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint host1:29400"
        lines = [
            f"on host{host} {' '.join(TORCHRUN)} --rdzv-id a {how} {script}" for host in (0, 1)
        ]
    elif way == "srun":
        said = "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4"
        said += f" HOME={tmp_path}"
        lines = [
            f"on host{rank // 2} {said} SLURM_PROCID={rank} SLURM_LOCALID={rank % 2} {python}"
            for rank in range(4)
        ]
    else:
        said = f"HORORING_SIZE=4 HORORING_SECRET_FILE={tmp_path}/secret"
        said += " HORORING_RENDEZVOUS=host0:29411"
        (tmp_path / "secret").write_text(SECRET)
        lines = [
            f"on host{rank // 2} {said} JOB_COMPLETION_INDEX={rank} {python}" for rank in range(4)
        ]
    check_ranks(on_hosts(tmp_path, lines), 4, per_host=2)
    assert [path.name for path in tmp_path.rglob("hororing-*")] == []


@tiers.full
@pytest.mark.skipif(bool(mpirun.why_no_hosts()), reason=mpirun.why_no_hosts())
def test_pods_know_the_name_of_pod_0(script: str, tmp_path: Path):
    """Kubernetes puts a pod's own name into /etc/hosts, with the job's service."""
    (tmp_path / "secret").write_text(SECRET)
    processes = []
    for rank in range(2):
        hosts = tmp_path / f"hosts.{rank}"
        # The other pod's name comes from DNS.
        hosts.write_text(
            "127.0.0.1 localhost\n"
            + "".join(
                f"127.0.0.{2 + each} train-{each}.mesh.ns.svc train-{each}\n" for each in range(2)
            )
        )
        pod = (
            f"hostname train-{rank} && mount --bind {hosts} /etc/hosts && "
            f"exec {sys.executable} {script}"
        )
        variables = {
            "JOB_COMPLETION_INDEX": str(rank), "HORORING_SIZE": "2",
            "HORORING_SECRET_FILE": str(tmp_path / "secret"),
        }  # fmt: skip
        processes.append((["unshare", "--uts", "--mount", "bash", "-c", pod], variables))
    found = outputs(processes)
    assert found.count('"size": 2') == found.count('"sum": 3.0') == 2, found
    assert found.count('"job": "train"') == 2
