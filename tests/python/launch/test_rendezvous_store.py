"""The store and its members: protocol, worlds of threads, intruders, ends. Push tier, 5 s."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import os
import random
import resource
import signal
import socket
import string
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiers

from hororing._job.rendezvous import client, patience, protocol
from hororing._job.rendezvous.client import Member, RendezvousError
from hororing._job.rendezvous.interfaces import addresses
from hororing._job.rendezvous.protocol import Hello, ProtocolError
from hororing._job.rendezvous.store import Store

SECRET = bytes(range(32))
DEADLINE_S = 30.0


@pytest.fixture
def made() -> Iterator[Callable[..., Store]]:
    stores = []

    def make(size: int, **more: Any) -> Store:
        store = Store(**{"job": "a job", "size": size, "secret": SECRET, **more})
        store.start_thread()
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.stop()


def member(store: Store, rank: int, **more: Any) -> Member:
    told = {"secret": SECRET, "job": "a job", "rank": rank, "size": store.size, "host": "here"}
    address = more.pop("address", f"127.0.0.1:{store.port}")
    return Member(address, **{"timeout_s": DEADLINE_S, **told, **more})


def on_threads(size: int, body: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(body, range(size)))


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def raw(store: Store) -> socket.socket:
    return socket.create_connection(("127.0.0.1", store.port), timeout=DEADLINE_S)


def read_frame(connection: socket.socket) -> dict[str, Any]:
    size = protocol.length(connection.recv(4, socket.MSG_WAITALL), protocol.MAX_BYTES)
    return protocol.decode(connection.recv(size, socket.MSG_WAITALL))


def is_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True  # otherwise the socket's timeout raises


HELLO = Hello("a job", 1, 2, "here", 77, "00" * 16)


def greeting(connection: socket.socket, secret: bytes = SECRET) -> bytes:
    """Return the first frame of a member that knows `secret`."""
    nonce = read_frame(connection)["nonce"]
    proof = protocol.proof(secret, protocol.MEMBER, nonce, HELLO)
    return protocol.encode({**HELLO.message(), "proof": proof})


# ---------------------------------------------------------------------------------------------
# Protocol


def test_a_frame_is_read_as_it_was_written():
    for message in ({}, {"a": [1, "x\u00e4\U0001f600\ud800", None, 1.5, True]}, {"": {"b": ""}}):
        frame = protocol.encode(message)
        assert protocol.length(frame[:4], 100) == len(frame) - 4
        assert protocol.decode(frame[4:]) == message


def test_frames_come_in_pieces_of_any_size():
    messages = [{"a": n, "b": "x" * 7 * n} for n in range(20)]
    data = b"".join(map(protocol.encode, messages))
    chance = random.Random(7)
    for most in (1, 5, 1000):
        frames, place, found = protocol.Frames(), 0, []
        while place < len(data):
            size = chance.randint(1, most)
            found += frames.feed(data[place : place + size])
            place += size
        assert found == messages
    with pytest.raises(ProtocolError):
        protocol.Frames().feed(b"\xff" * 4)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"1", b"{", b"\xff{}", b'{"a": NaN}', b'{"a": 1e999}x', b"[" * 60_000,
     b'{"a":' + b"9" * 10_000 + b"}", "{'ä'}".encode()],
)  # fmt: skip
def test_what_is_no_object_is_a_protocol_error(body: bytes):
    with pytest.raises(ProtocolError):
        protocol.decode(body)


def test_a_frame_has_a_limit_on_both_sides():
    with pytest.raises(ProtocolError, match="4097 bytes"):
        protocol.length((4097).to_bytes(4, "big"), protocol.FIRST_BYTES)
    with pytest.raises(ValueError, match="of 1048576 that are allowed"):
        protocol.encode({"a": "x" * protocol.MAX_BYTES})


@pytest.mark.parametrize(
    "wrong",
    [{"rank": -1}, {"rank": 2}, {"rank": True}, {"rank": "1"}, {"size": 2**40}, {"nonce": "x"},
     {"nonce": "00"}, {"host": "a\x1b[2J"}, {"job": 1}, {"hororing": 1}, {"pid": None}],
)  # fmt: skip
def test_a_hello_is_checked(wrong: dict[str, Any]):
    assert protocol.parse_hello(HELLO.message()) == HELLO
    with pytest.raises(ProtocolError):
        protocol.parse_hello({**HELLO.message(), **wrong})


def test_parsers_raise_nothing_but_their_exception_whatever_comes():
    chance = random.Random(20261124)
    frame = json.dumps(HELLO.message()).encode()
    for _ in range(3000):
        body = bytearray(frame)
        for _ in range(chance.randrange(1, 6)):
            place = chance.randrange(len(body))
            how = chance.randrange(3)
            if how == 0:
                body[place] = chance.randrange(256)
            elif how == 1:
                del body[place : place + chance.randrange(1, 30)]
            else:
                body[place:place] = chance.choice([b'"', b"{", b"[", b"null", b"-1", b"1e9", b"\0"])
            body = body or bytearray(b" ")
        try:
            hello = protocol.parse_hello(protocol.decode(bytes(body)))
        except ProtocolError:
            continue
        assert 0 <= hello.rank < hello.size


def test_a_proof_is_of_one_side_one_connection_and_one_hello():
    right = protocol.proof(SECRET, protocol.MEMBER, "aa", HELLO)
    assert protocol.is_proof(right, SECRET, protocol.MEMBER, "aa", HELLO)
    other = Hello("a job", 0, 2, "here", 77, "00" * 16)
    assert not protocol.is_proof(right, SECRET, protocol.STORE, "aa", HELLO)
    assert not protocol.is_proof(right, SECRET, protocol.MEMBER, "ab", HELLO)
    assert not protocol.is_proof(right, SECRET, protocol.MEMBER, "aa", other)
    assert not protocol.is_proof(right, b"x" * 32, protocol.MEMBER, "aa", HELLO)
    for claimed in (None, 1, "", "ä", right[:-1]):
        assert not protocol.is_proof(claimed, SECRET, protocol.MEMBER, "aa", HELLO)


def test_words_and_repetitions_can_be_guessed_and_random_characters_cannot():
    for weak in (
        "training-secret-4711", "changeme-changeme-changeme",
        "correct horse battery staple", "a" * 64, "0123456789" * 6, "20261128-20261129-1",
        "CLUSTER_SECRET_2026", "abcdefghijklmnopqrstuvwxyz",
    ):  # fmt: skip
        assert protocol.is_guessable(weak.encode()), weak
    chance = random.Random(54)
    alphabet = string.ascii_letters + string.digits
    for _ in range(2000):
        assert not protocol.is_guessable(chance.randbytes(32))
        assert not protocol.is_guessable(chance.randbytes(32).hex().encode())
        assert not protocol.is_guessable(chance.randbytes(16).hex().encode())
        assert not protocol.is_guessable(base64.b64encode(chance.randbytes(24)))
        assert not protocol.is_guessable("".join(chance.choices(alphabet, k=32)).encode())


def test_addresses_are_read_and_shown():
    for text in ("a-b.c:1", "1.2.3.4:65535", "[::1]:80", "[fe80::1%eth0]:80"):
        assert protocol.show_address(*protocol.parse_address(text)) == text
    for text in (
        "",
        "a",
        "a:",
        "a:0",
        "a:65536",
        "::1:80",
        "a:b:1",
        "[]:1",
        "http://a:1",
        "a:-1",
        "\x1bc:1",
    ):
        with pytest.raises(ValueError, match="is not an address"):
            protocol.parse_address(text)
    assert protocol.is_loopback("localhost")
    assert protocol.is_loopback("127.3.2.1")
    assert protocol.is_loopback("::1")
    assert not any(map(protocol.is_loopback, ("", "0.0.0.0", "::", "10.0.0.1", "host0")))


# ---------------------------------------------------------------------------------------------
# Members


def test_sixty_four_members_share_and_say_that_they_are_done(made: Callable[..., Store]):
    store = made(64)

    def body(rank: int) -> list[list[str]]:
        one = member(store, rank)
        results = [one.share(f"{rank} of {turn}", DEADLINE_S) for turn in range(3)]
        one.done(rank)
        return results

    wanted = [[f"{rank} of {turn}" for rank in range(64)] for turn in range(3)]
    assert on_threads(64, body) == [wanted] * 64
    wait_until(lambda: store.statuses == {rank: rank for rank in range(64)})
    assert store.lost == {}


def test_texts_of_any_length_and_alphabet_come_back(made: Callable[..., Store]):
    store = made(3)
    most = protocol.TEXT_CHARACTERS
    texts = ["\U0001f600" * most, "", "\0ä\n" * (most // 3)]

    def body(rank: int) -> list[str]:
        one = member(store, rank)
        with pytest.raises(ValueError, match="characters"):
            one.share("x" * (most + 1))
        result = one.share(texts[rank])
        one.done()
        return result

    assert on_threads(3, body) == [texts] * 3


def test_a_store_may_start_after_its_members(made: Callable[..., Store]):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(
            Member, f"localhost:{port}", secret=SECRET, job="a job", rank=0, size=1,
            timeout_s=DEADLINE_S,
        )  # fmt: skip
        time.sleep(0.05)
        made(1, port=port)
        one = waits.result()
    assert one.local_address == "127.0.0.1"
    one.done()
    with pytest.raises(RendezvousError, match=r"rank 0 on host here found no store .* 0.05 s; .*"):
        member(Store(job="a job", size=1, secret=SECRET, port=port), 0, timeout_s=0.05,
               address="127.0.0.1:1")  # fmt: skip


@pytest.mark.parametrize("host", ["::1", ""])
def test_ipv6_and_every_interface(made: Callable[..., Store], host: str):
    try:
        store = made(1, host=host)
        with socket.create_connection(("::1", store.port)):
            pass
    except OSError:
        pytest.skip("there is no IPv6 here")
    one = member(store, 0, address=f"127.0.0.1:1,[::1]:{store.port}")
    assert (one.local_address, one.address) == ("::1", f"[::1]:{store.port}")
    one.done()
    if not host:
        wait_until(lambda: 0 in store.statuses)
        member(store, 0, address=f"{addresses()[0]}:{store.port}").done()


def test_without_a_secret_nobody_gets_in_unless_told_otherwise(
    made: Callable[..., Store], caplog: pytest.LogCaptureFixture
):
    for host in ("127.0.0.1", "0.0.0.0", "10.0.0.1", "host0"):
        with pytest.raises(ValueError, match="HORORING_INSECURE=1"):
            Store(job="a job", size=1, secret=b"", host=host)
        with pytest.raises(ValueError, match="HORORING_SECRET_KEY"):
            Member(f"{host}:1", secret=b"", job="a job", rank=0, size=1)
    one = member(made(1, secret=b"", host="", insecure=True), 0, secret=b"", insecure=True)
    assert "has no secret" in caplog.text
    assert not one.proven
    one.done()


# ---------------------------------------------------------------------------------------------
# Ends


def test_who_does_not_come_in_time_is_named(made: Callable[..., Store]):
    store = made(4)
    early, here = member(store, 1), member(store, 2)
    wanted = (
        r"2 ranks \(0, 3\) did not connect, or ended before; rank 2 connected, .* "
        r"rank 2 \(host here"
    )
    with pytest.raises(RendezvousError, match=wanted):
        early.share("x", 0.05)
    here.close()


def test_who_is_missing_is_named_to_all_and_who_gives_up_is_not(made: Callable[..., Store]):
    store = made(4)
    members = [member(store, rank) for rank in range(4)]  # rank 3 shares nothing

    def body(rank: int) -> str:
        with pytest.raises(RendezvousError) as error:
            members[rank].share("x", 0.05 + rank / 10)
        members[rank].close()  # as a rank that ends because of it
        assert error.value.rank == -1
        return str(error.value)

    texts = set(on_threads(3, body))
    assert len(texts) == 1
    assert texts.pop().startswith("rank 3 connected, but did not get here: rank 3 (host here")
    with pytest.raises(RendezvousError, match="rank 3 connected, but did not get here"):
        members[3].share("late", DEADLINE_S)  # it learns the reason, too
    members[3].close()


def test_rank_0_says_whom_it_waits_for_while_it_waits(
    made: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(patience, "FIRST_S", 0.05)
    store = made(3)
    early, here = member(store, 0), member(store, 2)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(early.share, "early", DEADLINE_S)
        wait_until(lambda: len(caplog.records) >= 2)
        texts = on_threads(
            2, lambda n: (here if n else member(store, 1)).share(f"late {n}", DEADLINE_S)
        )
        assert waits.result() == texts[0] == ["early", "late 0", "late 1"]
    for record in caplog.records:
        assert (
            "init: rank 0 has waited 0 s for the others: rank 1 did not connect"
            in record.getMessage()
        )
    assert len(caplog.records) < 10


def test_who_finds_no_store_says_where_it_looks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(patience, "FIRST_S", 0.05)
    with pytest.raises(RendezvousError, match="found no store"):
        Member("localhost:1", secret=SECRET, job="a", rank=1, size=2, host="here", timeout_s=0.3)
    wanted = (
        "init: rank 1 on host here has waited 0 s for the store of its job: "
        "localhost:1: [Errno 111] Connection refused (127.0.0.1)"
    )
    assert wanted in caplog.text
    assert len(caplog.records) < 4


def test_who_was_too_late_meets_the_others_when_they_try_again(made: Callable[..., Store]):
    store = made(2)
    early, late = member(store, 0), member(store, 1)
    for _ in range(2):
        with pytest.raises(RendezvousError, match="rank 1 connected"):
            early.share("given up", 0.02)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(late.share, "late", DEADLINE_S)
        wait_until(lambda: bool(store._exchange._gathers))
        assert not waits.done()  # the abandoned call does not count
        assert early.share("again", DEADLINE_S) == waits.result() == ["again", "late"]
    early.done()
    late.done()


def test_a_wait_that_was_interrupted_can_be_repeated(made: Callable[..., Store]):
    store = made(2)
    first, second = member(store, 0), member(store, 1)
    first._send_text("share 0", "interrupted", DEADLINE_S)
    wait_until(lambda: bool(store._exchange._gathers))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(first.share, "repeated", DEADLINE_S)
        wait_until(
            lambda: "repeated" in next(iter(store._exchange._gathers.values())).texts.values()
        )
        assert second.share("x", DEADLINE_S) == waits.result() == ["repeated", "x"]
    # The answer comes before the call is repeated, and half of it has been read.
    waiting = first._send_text("share 1", "y" * 30_000, DEADLINE_S)
    assert second.share("z", DEADLINE_S) == ["y" * 30_000, "z"]
    first._next("share 1", waiting)
    with pytest.raises(RendezvousError, match="is lost: a part of the answer is missing"):
        first.share("y")
    second.close()


def test_a_member_that_dies_is_named_to_all_who_wait_and_who_would(made: Callable[..., Store]):
    store = made(3)
    script = f"""
        import signal
        from hororing._job.rendezvous.client import Member
        one = Member("127.0.0.1:{store.port}", secret=bytes(range(32)), job="a job", rank=2, size=3,
                     host="there")
        print(flush=True)
        signal.pause()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE
    ) as dying:
        assert dying.stdout is not None
        dying.stdout.readline()
        first, second = member(store, 0), member(store, 1)
        with ThreadPoolExecutor(2) as pool:
            waits = [pool.submit(one.share, "x") for one in (first, second)]
            gathers = store._exchange._gathers
            wait_until(lambda: [len(each.waits) for each in gathers.values()] == [2])
            dying.send_signal(signal.SIGKILL)
            for each in waits:
                wanted = rf"rank 2 \(host there, pid {dying.pid}\) closed its connection unexp"
                with pytest.raises(RendezvousError, match=wanted) as caught:
                    each.result()
                assert caught.value.rank == 2
    with pytest.raises(RendezvousError, match="rank 2"):
        second.share("x")
    with pytest.raises(RendezvousError, match="closed its connection unexpectedly") as refused:
        member(store, 2)
    assert refused.value.refused
    first.done()
    second.done()


def test_who_is_done_is_not_waited_for_and_may_come_again(made: Callable[..., Store]):
    store = made(2)
    first, second = member(store, 0), member(store, 1)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(first.share, "x")
        wait_until(lambda: bool(store._exchange._gathers))
        second.done(3)
        with pytest.raises(RendezvousError, match="rank 1 has ended with status 3"):
            waits.result()
    first.done()
    wait_until(lambda: store.statuses == {0: 0, 1: 3})

    def again(rank: int) -> list[str]:
        one = member(store, rank)
        texts = one.share(str(rank))
        one.done()
        return texts

    assert on_threads(2, again) == [["0", "1"]] * 2


def test_who_is_done_is_waited_for_until_its_process_has_ended(made: Callable[..., Store]):
    store = made(2, ends_are_noted=True)
    first, second = member(store, 0), member(store, 1)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(first.share, "first script")
        wait_until(lambda: bool(store._exchange._gathers))
        second.done()
        wait_until(lambda: store.statuses == {1: 0})
        second = member(store, 1)
        assert second.share("second script") == waits.result() == ["first script", "second script"]
        waits = pool.submit(first.share, "x")
        wait_until(lambda: bool(store._exchange._gathers))
        second.done()
        store.note_end(1)
        with pytest.raises(RendezvousError, match="rank 1 has ended with status 0"):
            waits.result()
    first.done()


def test_a_store_that_ends_is_an_error_and_done_is_none(made: Callable[..., Store]):
    store = made(2)
    first, second = member(store, 0), member(store, 1)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(first.share, "x")
        wait_until(lambda: bool(store._exchange._gathers))
        store.stop()
        with pytest.raises(RendezvousError, match="is lost: it has closed the connection"):
            waits.result()
    with pytest.raises(RendezvousError, match="lost its connection"):
        first.share("x")
    second.done()
    first.done()


def test_a_store_ends_while_members_come(
    made: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
):
    # In Python 3.11, wait_for ignores a cancellation if its result comes at the same time.
    store = made(1)
    let_in = store._admit

    async def and_the_store_ends(*how: Any) -> Any:
        peer = await let_in(*how)
        threading.Thread(target=store.stop, name="ends").start()
        time.sleep(0.3)  # blocks the loop, whose next step cancels the caller
        return peer

    monkeypatch.setattr(store, "_admit", and_the_store_ends)
    came = []
    with contextlib.suppress(RendezvousError):
        came.append(member(store, 0, timeout_s=5))
    for thread in threading.enumerate():
        if thread.name in ("ends", "hororing-store"):
            thread.join(DEADLINE_S / 2)
            assert not thread.is_alive()
    for each in came:
        each.close()


def test_threads_may_stop_a_store_at_the_same_time(made: Callable[..., Store]):
    for _ in range(20):
        store = made(1)
        on_threads(4, lambda _, store=store: store.stop())


def test_a_forked_child_neither_keeps_its_parent_in_the_job_nor_ends_it(
    made: Callable[..., Store], tmp_path: Path
):
    store = made(1)
    one = member(store, 0)
    one.at_close.append((tmp_path / "called").touch)
    child = os.fork()
    if child == 0:
        one.done()
        (tmp_path / "child").touch()
        signal.pause()
        os._exit(0)
    try:
        wait_until((tmp_path / "child").exists)
        assert not (tmp_path / "called").exists()
        one.close()
        wait_until(lambda: 0 in store.lost)
        assert (tmp_path / "called").exists()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_child_keeps_neither_the_port_nor_the_connections_of_a_store(
    made: Callable[..., Store], tmp_path: Path
):
    store = made(2)
    one = member(store, 0)
    with raw(store) as other:
        read_frame(other)
        held = [each for each in client._sockets if each.fileno() >= 0]
        assert len(held) >= 4  # the listener, two of the store and one of `one`
        assert not any(each.get_inheritable() for each in held)
        child = os.fork()
        if child == 0:
            (tmp_path / "child").touch()
            signal.pause()
            os._exit(0)
        try:
            wait_until((tmp_path / "child").exists)
            with pytest.raises(RendezvousError, match="rank 1 did not connect, or ended before"):
                one.share("x", 0.01)  # the parent's connection still works
            one.done()
            store.stop()
            assert is_closed(other)
            socket.create_server(("127.0.0.1", store.port)).close()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_an_address_that_says_nothing_holds_up_no_other(made: Callable[..., Store]):
    store = made(1)
    with contextlib.ExitStack() as files:
        hole = files.enter_context(socket.socket())
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        for _ in range(5):  # fills the backlog: the kernel drops later connections
            each = files.enter_context(socket.socket())
            each.setblocking(False)
            each.connect_ex(hole.getsockname())
        address = f"127.0.0.1:{hole.getsockname()[1]}"
        began = time.monotonic()
        member(store, 0, address=f"{address},127.0.0.1:{store.port}").done()
        assert time.monotonic() - began < 4
        wanted = f"within 0.3 s; 127.0.0.1:1: .* refused; {address}: timed out"
        with pytest.raises(RendezvousError, match=wanted):
            member(store, 0, address=f"{address},127.0.0.1:1", timeout_s=0.3)


# ---------------------------------------------------------------------------------------------
# Others


def test_who_is_refused_is_told_why(made: Callable[..., Store]):
    store = made(2)
    first = member(store, 0)
    with pytest.raises(RendezvousError, match=r"rank 0 \(host b, .* of rank 0 \(ho.* one launcher"):
        member(store, 0, host="b")
    with pytest.raises(RendezvousError, match="to a job of 3 ranks, but this has 2"):
        member(store, 1, size=3)
    with pytest.raises(RendezvousError, match="this is the store of another job"):
        member(store, 1, job="another job")
    first.done()


def test_two_jobs_on_a_host_never_meet(made: Callable[..., Store]):
    stores = [made(2), made(2, job="another", secret=b"y" * 32)]

    def body(number: int) -> list[str]:
        job, rank = divmod(number, 2)
        told = [{}, {"job": "another", "secret": b"y" * 32}][job]
        one = member(stores[job], rank, **told)
        texts = one.share(str(number))
        one.done()
        return texts

    assert on_threads(4, body) == [["0", "1"]] * 2 + [["2", "3"]] * 2


def test_a_wrong_secret_is_noticed_by_both_sides(made: Callable[..., Store]):
    store = made(2)
    with pytest.raises(RendezvousError, match="does not have the secret") as caught:
        member(store, 0, secret=b"z" * 32)
    assert not caught.value.refused
    with raw(store) as liar:
        liar.sendall(greeting(liar, b"z" * 32))
        # Nothing that depends on the secret, or he could try words offline.
        assert read_frame(liar) == {"proof": ""}
        assert is_closed(liar)
    assert store._peers == {}
    assert store.lost == {}


def test_a_recorded_connection_is_of_no_use_later(made: Callable[..., Store]):
    store = made(2)
    with raw(store) as first:
        recorded = greeting(first)
        first.sendall(recorded)
        assert set(read_frame(first)) == {"proof"}
        assert read_frame(first) == {"welcome": True}
        first.sendall(protocol.encode({"do": "done", "status": 0}))
        assert read_frame(first) == {"done": True}
    wait_until(lambda: 1 in store.statuses)
    with raw(store) as again:
        again.sendall(recorded)
        read_frame(again)
        assert read_frame(again) == {"proof": ""}
        assert is_closed(again)
    assert store._peers == {}


def test_garbage_and_half_open_connections_disturb_no_member(made: Callable[..., Store]):
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most), most))
    store = made(3)
    old = [member(store, 0), member(store, 1)]
    intruders = [raw(store) for _ in range(500)]
    chance = random.Random(500)
    for number, each in enumerate(intruders):
        if number % 2:
            continue  # half open, sends nothing
        words = [chance.randbytes(50), b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x02{}", b"\xff" * 9,
                 (2**20).to_bytes(4, "big") + b"x" * 9000, b"\0\0"]  # fmt: skip
        with contextlib.suppress(OSError):  # closed already
            each.sendall(words[number // 2 % len(words)])
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(each.share, "old", DEADLINE_S) for each in old]
        waits.append(pool.submit(lambda: member(store, 2).share("new", DEADLINE_S)))
        assert [each.result() for each in waits] == [["old", "old", "new"]] * 3
    assert sum(map(len, store._places.values())) <= 500
    for each in intruders:
        each.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))


def test_strangers_keep_neither_a_member_nor_other_addresses_waiting(made: Callable[..., Store]):
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2500, most), most))
    store = made(1)
    with contextlib.ExitStack() as connections:
        place = ("127.0.0.1", store.port)
        other = socket.create_connection(place, source_address=("127.0.0.2", 0))
        connections.enter_context(other)
        for _ in range(1000):
            connections.enter_context(raw(store)).sendall(b"\0\0")
        read_frame(connections.enter_context(raw(store)))  # all have been accepted
        began = time.monotonic()
        one = member(store, 0)
        assert time.monotonic() - began < 2
        one.done()
        read_frame(other)
        other.setblocking(False)
        with pytest.raises(BlockingIOError):  # it has not been closed
            other.recv(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))


def test_a_stranger_has_a_few_seconds(made: Callable[..., Store], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hororing._job.rendezvous.server._FIRST_S", 0.2)
    store = made(1)
    frame = protocol.encode(HELLO.message())
    with raw(store) as slow:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            for byte in frame:
                slow.sendall(bytes([byte]))
                time.sleep(0.02)
            pytest.fail(f"still there after {time.monotonic() - began:.1f} s")
    member(store, 0).done()


def test_a_member_that_sends_slowly_holds_nobody_up(made: Callable[..., Store]):
    store = made(3)
    slow, others = member(store, 0), [member(store, 1), member(store, 2)]
    assert slow._stream is not None
    frame = protocol.encode(
        {"do": "gather", "generation": 0, "key": "share 0", "text": "0", "timeout_s": 30}
    )
    slow._stream.socket.sendall(frame[:7])
    for each in others:
        with pytest.raises(RendezvousError, match=r"0, .* connected, but did not get here"):
            each.share("1", 0.01)
    slow._stream.socket.sendall(frame[7:])
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda one: one.share("1"), others)) == [["0", "1", "1"]] * 2
    for each in (slow, *others):
        each.close()


def test_a_member_that_talks_nonsense_is_lost_and_named(made: Callable[..., Store]):
    store = made(2)
    for rank, nonsense in enumerate([{"do": "fly"}, {"do": "gather", "key": 1}]):
        one = member(store, rank)
        assert one._stream is not None
        one._stream.socket.sendall(protocol.encode(nonsense))
        wait_until(lambda rank=rank: rank in store.lost)
        one.close()


def test_a_server_that_is_no_store_is_no_hang():
    answers = [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\x02[]", b"\0\0\0\x02{}"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                connection.sendall(answer)
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        for _ in answers:
            with pytest.raises(RendezvousError, match=f"the store at {address}: "):
                Member(address, secret=SECRET, job="a job", rank=0, size=1, timeout_s=DEADLINE_S)
        thread.join()
        began = time.monotonic()
        with pytest.raises(RendezvousError, match=r"within 0\.3 s; .*: "):  # only listens
            Member(address, secret=SECRET, job="a job", rank=0, size=1, timeout_s=0.3)
        assert time.monotonic() - began < 4


def test_nothing_raw_of_a_server_that_has_proved_nothing_is_in_a_text():
    refusal = protocol.encode({"refused": "\x1b]52;c;eA==\x07\x9b2J" + "x" * 10_000})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            connection, _ = listener.accept()
            connection.sendall(refusal)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(RendezvousError, match=r"\?\]52;c;eA==\?\?2Jx") as caught:
            Member(address, secret=SECRET, job="a job", rank=0, size=1, timeout_s=DEADLINE_S)
        thread.join()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2000


def test_the_secret_is_in_no_text(made: Callable[..., Store], caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    secret = b"the secret of the job " + b"0123456789"
    store = made(2, secret=secret)
    one = member(store, 0, secret=secret)
    shown = io.StringIO()
    print(repr(store), repr(one), vars(one), file=shown)
    for wrong in ({"rank": 0}, {"job": "b"}, {"size": 3}):
        with pytest.raises(RendezvousError) as caught:
            member(store, **{"secret": secret, "rank": 1, **wrong})
        print(caught.value, repr(caught.value), file=shown)
    one.close()
    text = shown.getvalue() + caplog.text
    assert "0123456789" not in text
    assert secret.hex() not in text


@tiers.full
def test_ten_thousand_half_open_connections_delay_a_member_by_seconds(made: Callable[..., Store]):
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 11_000:
        pytest.skip("not enough file descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    store = made(2)
    first = member(store, 0)
    intruders = [socket.socket() for _ in range(10_000)]
    for each in intruders:
        each.setblocking(False)
        each.connect_ex(("127.0.0.1", store.port))
    began = time.monotonic()
    second = member(store, 1)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda one: one.share("x"), [first, second])) == [["x", "x"]] * 2
    assert time.monotonic() - began < 15
    for each in intruders:
        each.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))


@tiers.full
def test_a_thousand_members_form_a_world_in_seconds(made: Callable[..., Store]):
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    store = made(1000)
    began = time.monotonic()

    def body(rank: int) -> int:
        one = member(store, rank, timeout_s=120)
        count = len(set(one.share(f"{rank} 10.0.0.1:12345", 120)))
        one.done()
        return count

    assert on_threads(1000, body) == [1000] * 1000
    print(f"1000 members in {time.monotonic() - began:.2f} s")
    assert time.monotonic() - began < 60
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
