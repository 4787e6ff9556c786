"""The server: who is in a job, and the few texts that its ranks tell one another.

A connection is a membership: when it ends and the member has not said DONE, the rank is lost. Then
whoever waits for it is told, and so is whoever would wait later. Keys live under a generation;
there is one so far, 0. Nothing polls: a GET or a GATHER is answered when it can be, or at its
deadline.

Who has not proved yet that it knows the secret gets 3 s, 4 KiB, and one of 64 places. Others wait
in the kernel's queue, and where they wait, who has had a place for a while loses it, soon where it
has not said a word. So neither half-open connections nor garbage cost a member anything.

Everything runs in one event loop: that of the caller (`open`, `close`), or of a thread of the store
(`start_thread`, `stop`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from hororing.rendezvous import protocol
from hororing.rendezvous.client import keep_from_children, keep_watch
from hororing.rendezvous.protocol import Hello, ProtocolError

_FIRST_S = 3.0
_PLACES = 64
# How long a connection keeps its place when others wait for one: some trips over any network where
# it has said who it is, as members do at once.
_KEPT_S, _SILENT_S = 0.25, 0.02
_BACKLOG = 4096
_NO_FILES_S = 0.1  # before the next try, when the process has no file descriptors left
_START_S = 30.0
_CLOSE_S = 2.0
_AGAIN_S = 0.1


class _Refusal(Exception):
    """Why a process is not let in, for it to be told."""

    def __init__(self, text: str, again: bool = False) -> None:
        """`again`: it may try again, since this store will end and another one come."""
        super().__init__(text)
        self.again = again


@dataclass(eq=False)
class _Place:
    """A connection that has proved nothing yet."""

    writer: asyncio.StreamWriter
    until: float  # when it may lose its place


@dataclass(eq=False)
class _Peer:
    """A member and its connection."""

    hello: Hello
    writer: asyncio.StreamWriter
    done: int | None = None  # status, once it has been said
    deadlines: set[asyncio.TimerHandle] = field(default_factory=set)

    def send(self, frame: bytes) -> None:
        if not self.writer.is_closing():
            self.writer.write(frame)


@dataclass(eq=False)
class _Wait:
    """A GET or GATHER that is not answered yet."""

    peer: _Peer
    deadline: asyncio.TimerHandle | None

    def cancel(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.peer.deadlines.discard(self.deadline)

    def end(self, frame: bytes) -> None:
        self.cancel()
        self.peer.send(frame)


@dataclass(eq=False)
class _Gather:
    """The texts that have come, and who waits for the rest, by rank."""

    texts: dict[int, str] = field(default_factory=dict)
    waits: dict[int, _Wait] = field(default_factory=dict)


class Store:
    """The server of one job.

    Parameters
    ----------
    job : its name; members of other jobs are refused.
    size : how many ranks there are.
    secret : of `protocol.new_secret`; b"" lets everybody in, and is a ValueError unless `host` is a
        loopback address or `insecure`.
    host : address to listen on; "": all of this host, IPv4 and IPv6.
    port : 0 for a free one.
    one_start : it ends with the processes of this start, since one of them has it: a rank that has
        ended does not come again, and who claims to be it is of a later start.
    when_complete : called once, when all ranks are in and before any of them is told anything.

    Attributes
    ----------
    port : where it listens, once it is open.
    statuses : what ranks have said with DONE.
    lost : ranks whose connection ended without that, and who they were.
    """

    def __init__(
        self,
        *,
        job: str,
        size: int,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        insecure: bool = False,
        one_start: bool = False,
        when_complete: Callable[[], None] = lambda: None,
    ) -> None:
        protocol.check_secret(secret, host, insecure)
        self.job, self.size, self.host, self.port = job, size, host, port
        self._one_start, self._when_complete = one_start, when_complete
        self.statuses: dict[int, int] = {}
        self.lost: dict[int, str] = {}
        self._secret = secret
        self._closing = False
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._places: set[_Place] = set()
        self._place_is_free = asyncio.Event()
        self._peers: dict[int, _Peer] = {}
        self._values: dict[tuple[int, str], str] = {}
        self._gets: dict[tuple[int, str], list[_Wait]] = {}
        self._gathers: dict[tuple[int, str], _Gather] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Lock()

    # -----------------------------------------------------------------------------------------
    # Life

    def listen(self) -> None:
        """Bind and listen. OSError where the address is in use, or is not of this host."""
        self._listener = _listen(self.host, self.port)
        keep_from_children(self._listener)
        self.port = self._listener.getsockname()[1]

    async def open(self) -> None:
        """Let members in from now on."""
        if self._listener is None:
            self.listen()
        self._accepting = asyncio.ensure_future(self._accept())

    async def close(self) -> None:
        """End every connection, and listen no more."""
        self._closing = True
        writers = [peer.writer for peer in self._peers.values()]
        while tasks := [
            each for each in (self._accepting, *self._serving) if each and not each.done()
        ]:
            for task in tasks:
                task.cancel()
            # Then again: wait_for of Python 3.11 forgets it if its result comes at the same time.
            await asyncio.wait(tasks, timeout=_AGAIN_S)
        closed = [asyncio.ensure_future(writer.wait_closed()) for writer in writers]
        if closed:  # what they were told last must still reach them
            await asyncio.wait(closed, timeout=_CLOSE_S)
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def start_thread(self) -> None:
        """Open it in a thread of its own; returns when members can connect."""
        if self._listener is None:
            self.listen()
        loop = asyncio.new_event_loop()
        self._loop = loop
        self._thread = threading.Thread(
            target=_run, args=(loop,), name="hororing-store", daemon=True
        )
        self._thread.start()
        self._call(self.open())

    def stop(self) -> None:
        """Close it and end its thread. Does nothing where there is none; any thread may call it."""
        with self._stopping:
            if self._thread is None or self._loop is None:
                return
            self._call(self.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_START_S)
            self._thread = None

    def _call(self, what: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(what, self._loop).result(_START_S)

    # -----------------------------------------------------------------------------------------
    # Connections

    async def _accept(self) -> None:
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        while True:
            await self._wait_for_place()
            try:
                accepted, _ = await loop.sock_accept(self._listener)
            except OSError:  # no file descriptors left, or the peer has gone already
                self._drop_one()
                await asyncio.sleep(_NO_FILES_S)
                continue
            try:
                await self._begin(accepted)
            except OSError:
                accepted.close()

    async def _begin(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        keep_watch(accepted)
        reader = asyncio.StreamReader(limit=protocol.FIRST_BYTES)
        made = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: made, accepted)
        writer = asyncio.StreamWriter(transport, made, reader, loop)
        place = _Place(writer, time.monotonic() + _SILENT_S)
        self._places.add(place)
        task = asyncio.ensure_future(self._serve(reader, writer, place))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _wait_for_place(self) -> None:
        while len(self._places) >= _PLACES:
            left = min(place.until for place in self._places) - time.monotonic()
            if left <= 0:
                self._drop_one()
                return
            self._place_is_free.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._place_is_free.wait(), left)

    def _drop_one(self) -> None:
        if self._places:
            first = min(self._places, key=lambda place: place.until)
            self._leave(first)
            first.writer.transport.abort()

    def _leave(self, place: _Place) -> None:
        self._places.discard(place)
        self._place_is_free.set()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: _Place
    ) -> None:
        peer = None
        try:
            peer = await asyncio.wait_for(self._let_in(reader, writer, place), _FIRST_S)
            while peer.done is None:
                self._answer(peer, await _read(reader, protocol.MOST_BYTES))
        except _Refusal as refusal:
            with contextlib.suppress(ValueError):
                told = {"refused": str(refusal), "again": refusal.again}
                writer.write(protocol.encode(told))
        except (ProtocolError, OSError, EOFError, asyncio.TimeoutError):
            pass
        finally:
            self._leave(place)
            if peer is not None and not self._closing:  # or it would be the store that ends
                self._ended(peer)
            writer.close()

    async def _let_in(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: _Place
    ) -> _Peer:
        hello = protocol.parse_hello(await _read(reader, protocol.FIRST_BYTES))
        if hello.job != self.job:
            raise _Refusal("this is the store of another job")
        place.until = time.monotonic() + _KEPT_S
        nonce = protocol.new_nonce()
        proof = protocol.proof(self._secret, protocol.STORE, nonce, hello)
        writer.write(protocol.encode({"nonce": nonce, "proof": proof}))
        claimed = (await _read(reader, protocol.FIRST_BYTES)).get("proof")
        if not protocol.is_proof(claimed, self._secret, protocol.MEMBER, nonce, hello):
            raise ProtocolError("a wrong proof")
        # Only now: who knows the secret may know who is in the job.
        if hello.size != self.size:
            raise _Refusal(
                f"{hello.who()} is of a job of {hello.size} ranks, and this one has {self.size}"
            )
        there = self._peers.get(hello.rank)
        if there is not None:
            raise _Refusal(f"{hello.who()} claims the rank of {there.hello.who()}")
        if hello.rank in self.lost:
            raise _Refusal(
                f"{hello.who()} comes for {self.lost[hello.rank]}, which has ended",
                again=self._one_start,
            )
        if self._one_start and hello.rank in self.statuses:
            raise _Refusal(f"rank {hello.rank} of this job has ended", again=True)
        self._leave(place)
        peer = _Peer(hello, writer)
        self._peers[hello.rank] = peer
        self.statuses.pop(hello.rank, None)
        if len(self._peers) == self.size:
            complete, self._when_complete = self._when_complete, lambda: None
            complete()
        peer.send(protocol.encode({"welcome": True}))
        return peer

    def _ended(self, peer: _Peer) -> None:
        rank = peer.hello.rank
        for deadline in peer.deadlines:
            deadline.cancel()
        del self._peers[rank]
        if peer.done is None:
            self.lost[rank] = peer.hello.who()
        else:
            self.statuses[rank] = peer.done
        for key, gather in list(self._gathers.items()):
            gather.waits.pop(rank, None)
            if peer.done is None or rank not in gather.texts:
                del self._gathers[key]
                for wait in gather.waits.values():
                    wait.end(self._gone(key, rank))
        for key, waits in list(self._gets.items()):
            self._gets[key] = [wait for wait in waits if wait.peer is not peer]
            if peer.done is None:
                for wait in self._gets.pop(key):
                    wait.end(self._gone(key, rank))

    # -----------------------------------------------------------------------------------------
    # Requests

    def _answer(self, peer: _Peer, message: dict[str, Any]) -> None:
        what = protocol.take(message, "do", str)
        if what == "done":
            peer.done = protocol.take(message, "status", int)
            peer.send(protocol.encode({"done": True}))
            return
        key = (protocol.take(message, "generation", int), protocol.take(message, "key", str))
        if len(key[1]) > protocol.FIRST_BYTES:
            raise ProtocolError("a key that is too long")
        if what == "get":
            self._get(peer, key, message)
            return
        text = protocol.take(message, "text", str)
        if len(text) > protocol.TEXT_CHARACTERS:
            raise ProtocolError("a text that is too long")
        if what == "put":
            self._values[key] = text
            peer.send(_about(key, {}))
            for wait in self._gets.pop(key, []):
                wait.end(_about(key, {"text": text}))
        elif what == "gather":
            self._gather(peer, key, text, message)
        else:
            raise ProtocolError("an unknown request")

    def _get(self, peer: _Peer, key: tuple[int, str], message: dict[str, Any]) -> None:
        if key in self._values:
            peer.send(_about(key, {"text": self._values[key]}))
        elif self.lost:
            peer.send(self._gone(key, next(iter(self.lost))))
        else:
            waits = self._gets.setdefault(key, [])

            def missed() -> None:
                waits.remove(wait)
                wait.end(_about(key, {"error": f"nobody has told {key[1]!r}", "late": True}))

            wait = self._wait(peer, message, missed)
            waits.append(wait)

    def _gather(
        self, peer: _Peer, key: tuple[int, str], text: str, message: dict[str, Any]
    ) -> None:
        if self.lost:
            peer.send(self._gone(key, next(iter(self.lost))))
            return
        gather = self._gathers.setdefault(key, _Gather())
        rank = peer.hello.rank
        earlier = gather.waits.pop(rank, None)
        if earlier is not None:  # a wait that was interrupted
            earlier.cancel()
        gather.texts[rank] = text

        def missed() -> None:
            # Whoever gives up takes no part: all have the texts, or nobody has.
            del gather.waits[rank], gather.texts[rank]
            missing = [
                each for each in range(self.size) if each not in gather.texts and each != rank
            ]
            wait.end(_about(key, {"error": self._missing(missing), "late": True}))

        wait = self._wait(peer, message, missed)
        gather.waits[rank] = wait
        if len(gather.texts) == self.size:
            del self._gathers[key]
            frames = _texts(key, [gather.texts[each] for each in range(self.size)])
            for each in gather.waits.values():
                each.end(frames)

    def _wait(self, peer: _Peer, message: dict[str, Any], missed: Callable[[], None]) -> _Wait:
        timeout_s = message.get("timeout_s")
        if timeout_s is None:
            return _Wait(peer, None)
        timeout_s = protocol.take(message, "timeout_s", float)
        deadline = asyncio.get_running_loop().call_later(max(timeout_s, 0.0), missed)
        peer.deadlines.add(deadline)
        return _Wait(peer, deadline)

    def _missing(self, ranks: list[int]) -> str:
        """Who has not come, and who of them has at least connected."""
        here = [rank for rank in ranks if rank in self._peers]
        away = [rank for rank in ranks if rank not in self._peers]
        parts = []
        if away:
            parts.append(f"{_ranks(away)} never connected or ended")
        if here:
            named = ", ".join(self._peers[rank].hello.who() for rank in here[:8])
            parts.append(f"{_ranks(here)} connected, but did not get here: {named}")
        return "; ".join(parts)

    def _gone(self, key: tuple[int, str], rank: int) -> bytes:
        if rank in self.lost:
            text = f"{self.lost[rank]} has ended without a word"
        else:
            text = f"rank {rank} has ended with status {self.statuses.get(rank)}"
        return _about(key, {"error": text, "rank": rank})


def _about(key: tuple[int, str], what: dict[str, Any]) -> bytes:
    return protocol.encode({"generation": key[0], "key": key[1], **what})


def _texts(key: tuple[int, str], texts: list[str]) -> bytes:
    """The frames with everybody's texts: each holds some, from rank "first" on."""
    frames, part, size = [], [], 0
    for rank, text in enumerate(texts):
        part.append(text)
        size += protocol.CHARACTER_BYTES * len(text) + 4  # quotes and a comma
        if size > protocol.MOST_BYTES // 4:
            frames.append(_about(key, {"first": rank + 1 - len(part), "texts": part}))
            part, size = [], 0
    return b"".join([*frames, _about(key, {"first": len(texts) - len(part), "texts": part})])


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown})"


async def _read(reader: asyncio.StreamReader, most: int) -> dict[str, Any]:
    head = await reader.readexactly(protocol.LENGTH_BYTES)  # IncompleteReadError is an EOFError
    return protocol.decode(await reader.readexactly(protocol.length(head, most)))


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


def _listen(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be built in and turned off
            made = socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
            made.setblocking(False)
            return made
    family, _, _, _, address = socket.getaddrinfo(
        host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        raise
    made.setblocking(False)
    return made
