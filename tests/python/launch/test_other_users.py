"""Attacks of another user of the host, on each thing that he can reach. Push tier, 8 s."""

from __future__ import annotations

import encodings.idna  # noqa: F401  # another user may not be allowed to load it later
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hororing._job import bootstrap, private_folder
from hororing._job.rendezvous.elastic_store import ElasticStore
from hororing._job.rendezvous.store import Store
from hororing.hororun.host.agent import free_port

STRANGER = 65533
RANKS = Path(__file__).parents[1] / "support/users_ranks.py"
ME = os.geteuid()
KEY = "8c1f35b1c0f1a35b3fb28a9d5a7a2b1e4d27e3c29d4faa0b6f0b8f7d61f2c394"
# As maps of user namespaces say, which a container may have.
LINES = Path("/proc/self/uid_map").read_text().splitlines()
MAP = [[int(each) for each in line.split()] for line in LINES]
KNOWN = any(first <= STRANGER < first + count for first, _, count in MAP)
needs_root = pytest.mark.skipif(
    ME != 0 or not KNOWN, reason="only root can start processes of two users, if there are two"
)


@pytest.fixture
def commons() -> Iterator[Path]:
    """Return a folder in which everybody can make files, like /dev/shm."""
    folder = Path(tempfile.mkdtemp(prefix="hororing-test-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def run(
    commons: Path, actions: str, *users: int, port: int = 0, **variables: str
) -> list[list[str]]:
    """Return what each action of each rank has returned, as JSON, or its exception."""
    told = {
        "HORORING_RENDEZVOUS": f"127.0.0.1:{port or free_port()}", "HORORING_TIMEOUT_S": "2",
        **variables,
    }  # fmt: skip
    words = [sys.executable, str(RANKS), str(commons), actions, *map(str, users)]
    done = subprocess.run(
        words, env={**os.environ, **told}, capture_output=True, text=True, timeout=60, check=False
    )
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert sorted(lines) == [str(rank) for rank in range(len(users))], done
    return [json.loads(lines[str(rank)]) for rank in range(len(users))]


def test_ranks_of_one_user_need_no_secret(commons: Path):
    assert run(commons, "meet", ME, ME) == [['{"rank": 0}']] * 2
    (key,) = commons.glob("*/*")
    assert (key.name, key.stat().st_mode & 0o777, len(key.read_bytes())) == ("key", 0o600, 32)


@needs_root
@pytest.mark.parametrize("users", [(ME, STRANGER), (STRANGER, ME)])
def test_another_user_neither_joins_nor_is_taken_for_rank_0(commons: Path, users: tuple[int, int]):
    (first,), (second,) = run(commons, "attack", *users)
    assert "rank 1 did not connect" in first
    assert "does not have the secret of this job" in second
    assert not (commons / "evil").exists()


@pytest.fixture
def stranger() -> Iterator[Callable[[Callable[[], str]], str]]:
    """Return a function that calls another one in a process of another user, which lives on."""
    children = []

    def start(act: Callable[[], str]) -> str:
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            try:
                said = act()
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            os.write(theirs, said.encode())
            os.close(theirs)
            signal.pause()
        children.append(child)
        os.close(theirs)
        with os.fdopen(ours) as file:
            return file.read()

    yield start
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@needs_root
def test_who_takes_the_port_first_is_not_taken_for_the_store(
    commons: Path, stranger: Callable[[Callable[[], str]], str]
):
    def squat() -> str:
        store = Store(job="job", size=2, secret=b"", insecure=True)
        store.start_thread()
        return str(store.port)

    port = stranger(squat)
    (first,), (second,) = run(commons, "meet", ME, ME, port=int(port))
    assert "does not have the secret of this job" in second
    assert f"rank 0 did not start a store, because port {port} of its host is in use" in first


@needs_root
def test_another_user_does_not_join_an_elastic_job(
    commons: Path,
    stranger: Callable[[Callable[[], str]], str],
    monkeypatch: pytest.MonkeyPatch,
):
    def place() -> list[Path]:
        return [commons / str(os.geteuid())]

    monkeypatch.setattr(private_folder, "candidates", place)
    secret, job, _ = bootstrap.of_store("127.0.0.1")
    store = ElasticStore(job=job, secret=secret, np=1)
    store.start_thread()
    monkeypatch.setenv("HORORING_RENDEZVOUS", f"127.0.0.1:{store.port}")
    try:
        for insecure in ("0", "1"):
            monkeypatch.setenv("HORORING_INSECURE", insecure)
            said = stranger(lambda: str(bootstrap.join({"TIMEOUT_S": 5})))
            assert "does not have the secret of this job" in said
        monkeypatch.setenv("HORORING_INSECURE", "0")
        one = bootstrap.join({"TIMEOUT_S": 5})
        assert one.next_world(0, 0, failed=False).generation == 1
        one.done()
    finally:
        store.stop()


@needs_root
@pytest.mark.parametrize("users", [(ME, STRANGER), (STRANGER, ME)])
def test_a_segment_of_another_user_is_an_error_on_every_rank(commons: Path, users: tuple[int, int]):
    wanted = f"rank 1: shared memory: user {users[1]} may not use /dev/shm/hororing"
    for (raised,) in run(commons, "meet", *users, ME, HORORING_SECRET_KEY=KEY):
        assert raised.startswith(f"TransportError: {wanted}"), raised
        assert f"of user {users[0]}; start every rank of a host as the same user" in raised


def test_nothing_is_unpickled_from_ranks_without_a_proof(commons: Path):
    actions = "gather_evil,elastic_state,attack"
    sender, other = run(commons, actions, ME, ME, HORORING_INSECURE="1")
    for raised in [*sender[:2], *other]:
        assert "ValueError" in raised
        assert "with HORORING_INSECURE=1 any process may be a rank" in raised
        assert "give every rank the same HORORING_SECRET_FILE" in raised
    assert not (commons / "evil").exists()


@pytest.mark.full
def test_plain_training_works_without_a_secret_for_those_who_ask(commons: Path):
    (first,), (second,) = run(commons, "train", ME, ME, HORORING_INSECURE="1")
    assert first == second
    values, betas = json.loads(first)[0]
    assert json.loads(first)[1] == [values, betas]
    assert betas == [0.9, 0.999]
