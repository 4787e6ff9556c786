"""From the environment to a connected member, without hororun. Push tier, 2 s."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mpirun
import pretend_hosts
import pytest
import tiers

from hororing import config
from hororing._job import bootstrap, endpoints, job_settings, private_folder
from hororing._job.launchers import Launch, detect
from hororing._job.rendezvous import files, interfaces, patience, protocol, user_key
from hororing._job.rendezvous.client import Member, RendezvousError
from hororing._job.rendezvous.store import Store

SETTINGS = {"ALONE": False, "TIMEOUT_S": 30.0}
KEY = "a secret of a job, which no text shows"
HERE = {"HORORING_RENDEZVOUS": "localhost:29400"}
RANK_1 = {"HORORING_RANK": "1", "HORORING_SIZE": "2"}


def find(environ: Mapping[str, str], **settings: Any) -> Member | None:
    return bootstrap.find(detect(environ), {**SETTINGS, **settings}, environ)


def shared(environ: Mapping[str, str], size: int = 2) -> list[list[str]]:
    """Run ranks as threads; return the texts that each has received."""

    def body(rank: int) -> list[str]:
        told = {**environ, "HORORING_RANK": str(rank), "HORORING_SIZE": str(size)}
        member = find(told)
        assert member is not None
        texts = member.share(f"rank {rank}", 30)
        member.share("", 30)  # no rank leaves before all have their texts
        member.done()
        return texts

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(body, range(size)))


@pytest.fixture
def port() -> int:
    """Return a free port outside the kernel's range of ephemeral ports."""
    while True:
        number = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", number))
            return number


@pytest.fixture
def secret_fd() -> Iterator[int]:
    number = os.memfd_create("secret")
    os.write(number, b"s" * 32)
    yield number
    os.close(number)


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        (
            {"HORORING_RANK": "1"},
            "HORORING_RANK is set, but HORORING_SIZE is not: .* or unset HORORING_RANK",
        ),
        (
            {"HORORING_SIZE": "2"},
            "HORORING_RANK is not: start with hororun -np N, set HORORING_RANK",
        ),
        ({"HORORING_LOCAL_RANK": "0"}, "HORORING_LOCAL_RANK is set, but HORORING_LOCAL_SIZE"),
        (
            {"HORORING_LOCAL_RANK": "0", "HORORING_LOCAL_SIZE": "1"},
            "HORORING_LOCAL_SIZE is set, but HORORING_SIZE is not",
        ),
        (HERE, "HORORING_RENDEZVOUS=localhost:29400 is set, but neither HORORING_RANK and"),
        (
            RANK_1,
            "HORORING_SIZE=2 shows that there are other ranks, but HORORING_RENDEZVOUS does not",
        ),
        ({**RANK_1, **HERE, "HORORING_RANK": "2"}, "HORORING_RANK=2 contradicts HORORING_SIZE=2"),
        ({**RANK_1, **HERE, "HORORING_RANK": "-1"}, "HORORING_RANK='-1' is not understood"),
        (
            {**RANK_1, **HERE, "HORORING_SIZE": "999999999"},
            "HORORING_SIZE=999999999: a job has at most 1048576 ranks",
        ),
        ({**RANK_1, **HERE, "HORORING_SIZE": "two"}, "HORORING_SIZE='two' is not understood"),
        (
            {**RANK_1, **HERE, "HORORING_LOCAL_RANK": "2", "HORORING_LOCAL_SIZE": "3"},
            "HORORING_LOCAL_RANK=2 contradicts HORORING_RANK=1",
        ),
        ({**RANK_1, "HORORING_RENDEZVOUS": "host"}, "RENDEZVOUS: 'host' is not an address"),
        ({**RANK_1, "HORORING_RENDEZVOUS": "file://a"}, "expected host:port or file:///directory"),
        ({**RANK_1, "HORORING_RENDEZVOUS": "file:///tmp"}, "needs HORORING_JOB"),
        ({**RANK_1, **HERE, "HORORING_JOB": "../a"}, "HORORING_JOB='../a' is not understood"),
        ({**RANK_1, **HERE, "HORORING_INSECURE": "2"}, "HORORING_INSECURE='2' is not understood"),
        ({**RANK_1, **HERE, "HORORING_SECRET_KEY": "short"}, "KEY: the secret has 5 bytes, and ne"),
        (
            {**RANK_1, **HERE, "HORORING_SECRET_KEY": "training-secret-4711"},
            "HORORING_SECRET_KEY: the secret can be guessed: .* openssl rand -hex 32",
        ),
        ({**RANK_1, **HERE, "HORORING_SECRET_FILE": "/no"}, "HORORING_SECRET_FILE=/no cannot be"),
        ({**RANK_1, **HERE, "HORORING_SECRET_FD": "999999"}, "HORORING_SECRET_FD=999999 cannot be"),
        ({**RANK_1, **HERE, "HORORING_SECRET_FD": "x"}, "HORORING_SECRET_FD='x' is not understood"),
        (
            {**RANK_1, **HERE, "HORORING_SECRET_KEY": KEY, "HORORING_SECRET_FILE": "/a"},
            "HORORING_SECRET_KEY and HORORING_SECRET_FILE are set",
        ),
        ({**RANK_1, "HORORING_RENDEZVOUS": "host0:1"}, "the job has no secret"),
    ],
)
def test_what_is_wrong_is_an_error_that_names_the_variable(environ: dict[str, str], wanted: str):
    config.load(environ)  # accepts these variables
    with pytest.raises(ValueError, match=wanted.replace("(", r"\(")) as caught:
        find(environ, TIMEOUT_S=0.01)
    assert KEY not in str(caught.value)


def test_a_misspelt_secret_is_not_shown():
    with pytest.raises(ValueError, match="did you mean HORORING_SECRET_KEY") as caught:
        config.load({"HORORING_SECRET_KYE": KEY})
    assert KEY not in str(caught.value)


def test_no_variables_and_one_rank_need_no_store():
    assert find({}) is None
    assert find({"HORORING_JOB": "a", "HORORING_RENDEZVOUS": ""}) is None
    assert find({"HORORING_RANK": "0", "HORORING_SIZE": "1"}) is None
    assert find({**RANK_1, **HERE}, ALONE=True) is None
    assert find({"HOROVOD_SIZE": "4", "HOROVOD_RANK": "1"}) is None  # init refuses this


def test_rank_and_size_may_be_the_launchers():
    torchrun = {"WORLD_SIZE": "4", "RANK": "1", **HERE}
    told = job_settings.read(detect(torchrun), torchrun)
    assert told is not None
    assert (told.rank, told.size) == (1, 4)
    assert detect(RANK_1) == Launch("hororun", 1, 2, mpi=False)
    assert detect({**RANK_1, "OMPI_COMM_WORLD_SIZE": "3"}).launcher == "hororun"


def test_the_store_of_a_launcher(secret_fd: int):
    store = Store(job="j1", size=2, secret=b"s" * 32)
    store.start_thread()
    environ = {
        "HORORING_RENDEZVOUS": f"127.0.0.1:{store.port}",
        "HORORING_JOB": "j1",
        "HORORING_SECRET_FD": str(secret_fd),
    }
    assert shared(environ) == [["rank 0", "rank 1"]] * 2
    assert shared(environ) == [["rank 0", "rank 1"]] * 2  # the secret can be read again
    store.stop()


def test_rank_0_has_the_store_where_there_is_no_launcher(port: int, tmp_path: Path):
    environ = {"HORORING_RENDEZVOUS": f"localhost:{port}", "HORORING_SECRET_KEY": KEY}
    assert shared(environ) == [["rank 0", "rank 1"]] * 2
    (tmp_path / "secret").write_text(KEY + "\n")
    del environ["HORORING_SECRET_KEY"]
    environ["HORORING_SECRET_FILE"] = str(tmp_path / "secret")
    environ["HORORING_RENDEZVOUS"] = f"{socket.gethostname()}:{port}"
    assert shared(environ, 3) == [["rank 0", "rank 1", "rank 2"]] * 3


def test_a_job_without_a_secret_is_of_one_user(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(private_folder, "candidates", lambda: [tmp_path / "no" / "home", tmp_path])
    environ = {"HORORING_RENDEZVOUS": f"127.0.0.1:{port}"}
    tmp_path.chmod(0o700)
    assert shared(environ) == [["rank 0", "rank 1"]] * 2
    assert [each.name for each in tmp_path.iterdir()] == ["key"]
    key = (tmp_path / "key").read_bytes()
    assert user_key.secret_of("a") == user_key.secret_of("a") != user_key.secret_of("b")
    assert key not in (user_key.secret_of("a"), user_key.secret_of("a", b"more"))
    first = find({**RANK_1, **environ, "HORORING_RANK": "0"})
    assert first is not None
    (tmp_path / "key").write_bytes(bytes(32))  # as of another user
    with pytest.raises(RendezvousError, match=r"not have the secret .* of one user on one host"):
        find({**RANK_1, **environ})
    first.done()
    (tmp_path / "key").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"no place for a key .*/no/home.*; .*key does not hold"):
        find({**RANK_1, **environ})


def test_who_asks_for_it_gets_a_job_without_a_secret(port: int, caplog: pytest.LogCaptureFixture):
    environ = {"HORORING_RENDEZVOUS": f"127.0.0.1:{port}", "HORORING_INSECURE": "1"}
    assert shared(environ) == [["rank 0", "rank 1"]] * 2
    assert "has no secret" in caplog.text


@pytest.fixture
def node0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make "node0" a name of this host that resolves to 127.0.0.1, like its own name on Debian."""
    resolve = socket.getaddrinfo

    def translated(host: str, *rest: Any, **more: Any) -> Any:
        return resolve("127.0.0.1" if host == "node0" else host, *rest, **more)

    monkeypatch.setattr("socket.getaddrinfo", translated)


@pytest.mark.usefixtures("node0")
def test_rank_0_says_why_it_has_no_store(
    port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    environ = {"HORORING_RANK": "0", "HORORING_SIZE": "2", "HORORING_SECRET_KEY": KEY}
    monkeypatch.setattr(interfaces, "is_own", lambda host: False)
    elsewhere = {**environ, "HORORING_RENDEZVOUS": f"node0:{port}"}
    wanted = r"a store, because node0 \(HORORING_RENDEZVOUS\) is not an address of its host"
    with pytest.raises(RendezvousError, match=wanted):
        find(elsewhere, TIMEOUT_S=0.1)
    assert "is not an address of its host" in caplog.text  # at once


def test_a_held_port_and_a_loopback_address_are_named_at_once(
    port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(patience, "FIRST_S", 0.05)
    environ = {"HORORING_RANK": "0", "HORORING_SIZE": "2", "HORORING_SECRET_KEY": KEY}
    environ["HORORING_RENDEZVOUS"] = f"127.0.0.1:{port}"
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        with pytest.raises(RendezvousError, match=r"because port .*; 127.0.0.1 is this host, and"):
            find(environ, TIMEOUT_S=0.3)
    assert f"because port {port} of its host is in use: by a store" in caplog.messages[0]
    assert "set HORORING_RENDEZVOUS to an address of rank 0's host" in caplog.messages[1]


def test_two_jobs_at_one_port_never_meet(port: int):
    def told(job: str, rank: int) -> dict[str, str]:
        return {
            "HORORING_RANK": str(rank), "HORORING_SIZE": "2", "HORORING_SECRET_KEY": KEY,
            "HORORING_RENDEZVOUS": f"localhost:{port}", "HORORING_JOB": job,
        }  # fmt: skip

    first = find(told("a", 0))
    assert first is not None
    for rank in (0, 1):
        with pytest.raises(RendezvousError, match="this is the store of another job"):
            find(told("b", rank))
    with pytest.raises(RendezvousError, match="claims the rank of rank 0"):
        find(told("a", 0))
    wanted = f"not have the secret .*; rank 0 .* because port {port} of its host is in use"
    with pytest.raises(RendezvousError, match=wanted):
        find({**told("a", 0), "HORORING_SECRET_KEY": KEY + KEY})
    second = find(told("a", 1))
    assert second is not None
    second.done()
    first.done()


def test_a_shared_directory(tmp_path: Path):
    environ = {"HORORING_RENDEZVOUS": f"file://{tmp_path}", "HORORING_JOB": "7.1"}
    assert shared(environ, 3) == [["rank 0", "rank 1", "rank 2"]] * 3
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_a_directory_is_the_users_alone(tmp_path: Path):
    one = files.serve(str(tmp_path), job="j", size=2, timeout_s=30)
    path = files.place(str(tmp_path), "j")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(RendezvousError, match=r"belongs to a running job .*another HORORING_JOB"):
        files.serve(str(tmp_path), job="j", size=2, timeout_s=30)
    path.chmod(0o644)  # as if another user had created it
    with pytest.raises(RendezvousError, match="is accessible to other users"):
        files.join(str(tmp_path), job="j", rank=1, size=2, timeout_s=0.05)
    one.done()
    assert not path.exists()


@pytest.mark.parametrize("taken", ["folder", "file"])
def test_a_pipe_that_another_user_puts_where_srun_ranks_meet_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str
):
    monkeypatch.setattr(endpoints, "_ONE_NODE", f"{tmp_path}/hororing-")
    monkeypatch.setattr(private_folder, "candidates", lambda: [tmp_path / "second"])
    folder = Path(f"{tmp_path}/hororing-{os.geteuid()}")
    if taken == "folder":
        os.mkfifo(folder, 0o666)
    else:
        folder.mkdir(mode=0o700)
        os.mkfifo(files.place(folder, "slurm.4242.0"), 0o666)
    slurm = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4242", "SLURM_STEP_NUM_NODES": "1"}

    def body(rank: int) -> list[str]:
        ranks = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": "2"}
        member = find({**slurm, **ranks})
        assert member is not None
        texts = member.share(f"rank {rank}", 30)
        member.done()
        return texts

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(body, range(2))) == [["rank 0", "rank 1"]] * 2


def test_rank_0_says_whose_file_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = files.place(tmp_path, "j")
    os.mkfifo(path, 0o600)

    def denied(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.replace", denied)  # as in a folder with the sticky bit
    told = {"HORORING_RENDEZVOUS": f"file://{tmp_path}", "HORORING_JOB": "j"}
    with pytest.raises(ValueError, match=rf"rank 0 cannot use \({path}: it is not a regular file"):
        find({**told, "HORORING_RANK": "0", "HORORING_SIZE": "2"})
    with pytest.raises(RendezvousError, match=rf"{path}: it is not a regular file; remove it"):
        find({**told, "HORORING_RANK": "1", "HORORING_SIZE": "2"}, TIMEOUT_S=0.1)
    if os.geteuid() == 0:
        os.chown(path, 65533, 65533)
        with pytest.raises(ValueError, match="it belongs to user 65533; remove it, or have it"):
            find({**told, "HORORING_RANK": "0", "HORORING_SIZE": "2"})


def stale(path: Path, **changes: Any) -> None:
    """Create the file of a killed rank 0, with changes as of another host."""
    script = (
        "import os, sys; from hororing._job.rendezvous import files; "
        "files.serve(sys.argv[1], job='j', size=2, timeout_s=30); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", script, str(path.parent)], check=True, timeout=30)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("owner", [None, {"pid": 1, "began": 1, "space": "another host"}])
def test_a_stale_file_is_not_joined_and_the_new_one_is(tmp_path: Path, owner: Any):
    path = files.place(str(tmp_path), "j")
    # On another host, it is unknown whether the owner is alive. Here another program has the port.
    other = Store(job="j", size=2, secret=protocol.new_secret())
    other.start_thread()
    changes = {"owner": owner, "address": f"127.0.0.1:{other.port}"} if owner else {}
    stale(path, **changes)
    wanted = "found no store of its job" if owner else "a job that has ended"
    with pytest.raises(RendezvousError, match=wanted):
        files.join(str(tmp_path), job="j", rank=1, size=2, timeout_s=0.3)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(files.join, str(tmp_path), job="j", rank=1, size=2, timeout_s=30)
        time.sleep(0.1)
        one = files.serve(str(tmp_path), job="j", size=2, timeout_s=30)
        two = waits.result()
    assert other._peers == {}
    two.done()
    one.done()
    other.stop()


def test_a_file_of_garbage_is_an_error_at_the_deadline(tmp_path: Path):
    path = files.place(str(tmp_path), "j")
    for text in ("", "{}", '{"job": "j", "address": "a", "secret": "xyz", "owner": {}}'):
        path.touch(0o600)
        path.write_text(text)
        with pytest.raises(RendezvousError, match="is not understood"):
            files.join(str(tmp_path), job="j", rank=1, size=2, timeout_s=0.02)


@pytest.mark.parametrize("place", ["", "127.0.0.1:1", "localhost:1"])
def test_rank_0_does_not_tell_others_to_look_for_it_at_home(place: str):
    assert not interfaces.reached_at(place).startswith("127.")


@pytest.mark.usefixtures("node0")
def test_ranks_beside_rank_0_do_not_tell_others_to_look_for_them_at_home(port: int):
    told = {"HORORING_SIZE": "2", "HORORING_RENDEZVOUS": f"node0:{port}"}
    told["HORORING_SECRET_KEY"] = KEY
    members = [find({**told, "HORORING_RANK": str(rank)}) for rank in range(2)]
    for each in reversed(members):
        assert each is not None
        assert not each.local_address.startswith("127.")
        each.done()


def test_an_interface_without_ipv4_has_the_widest_of_its_other_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "if_inet6"
    file.write_text(
        "fe80000000000000000000000000000a 02 40 20 80     ib9\n"
        "fd000000000000000000000000000007 02 40 00 08     ib9\n"  # another host has it, too
        "fd000000000000000000000000000001 02 40 00 80     ib9\n"
        "fe80000000000000000000000000000b 03 40 20 80     ib8\n"
    )
    monkeypatch.setattr(interfaces, "_IPV6", file)
    assert interfaces.chosen("ib9") == "fd00::1"
    assert interfaces.chosen("ib7,ib8") == "fe80::b%ib8"
    with pytest.raises(ValueError, match="ib7: no such network with an address; this host has"):
        interfaces.chosen("ib7")


SUM = """
import os, sys, numpy as np, hororing.numpy as hvd
hvd.init()
assert hvd.local_size() == 1 or "MASTER_ADDR" in os.environ  # so they talk over TCP
sys.stdout.write(f"sum {hvd.allreduce(np.ones(1000), op=hvd.Sum)[0]}\\n")
"""


@tiers.full
@pytest.mark.skipif(bool(mpirun.why_no_hosts()), reason=mpirun.why_no_hosts())
@pytest.mark.parametrize(
    "told",
    [
        f"HORORING_RENDEZVOUS=[fd00::1]:29512 HORORING_INTERFACE=d0 HORORING_SECRET_KEY='{KEY}'",
        f"HORORING_RENDEZVOUS=[fe80::a:1%d0]:29512 HORORING_SECRET_KEY='{KEY}'",
        "MASTER_ADDR=[fd00::1] MASTER_PORT=29512",
    ],
    ids=["interface", "link-local", "torch"],
)
def test_ranks_meet_and_talk_by_ipv6_alone(told: str):
    network = (
        "ip link set lo up && ip link add d0 type veth peer name d1 && "
        "ip link set d1 up && ip link set d0 up && "
        "ip -6 addr add fd00::1/64 dev d0 nodad && ip -6 addr add fe80::a:1/64 dev d0 nodad"
    )
    names = "RANK={0} WORLD_SIZE=2" if "MASTER" in told else "HORORING_RANK={0} HORORING_SIZE=2"
    ranks = [
        f"env {told} {names.format(rank)} PRETEND_HOSTS=a,b "
        f"{pretend_hosts.variables('a,b')[0]} {sys.executable} -c '{SUM}'"
        for rank in (0, 1)
    ]
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", f"{network} && {{ {ranks[0]} & {ranks[1]}; wait; }}"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.count("sum 2.0") == 2, done.stderr


def test_the_address_of_the_default_route_comes_first(monkeypatch: pytest.MonkeyPatch):
    found = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"}
    monkeypatch.setattr("socket.if_nameindex", lambda: list(enumerate(found)))
    monkeypatch.setattr(interfaces, "_address", found.__getitem__)
    monkeypatch.setattr(interfaces, "towards", lambda host: "10.0.0.1")
    wanted = ["10.0.0.1", "172.17.0.1", "10.1.0.1", "127.0.0.1", socket.gethostname()]
    assert interfaces.addresses() == wanted
