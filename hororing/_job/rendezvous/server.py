"""The base of every store: a server that admits peers that know the job's secret.

A peer that has not yet proved that it knows the secret gets 3 s, 4 KiB and one of up to 4,096
places. If all are taken, the oldest of the address that has most of them makes room for a new one.
Idle connections and garbage therefore neither harm members nor keep them waiting.

Everything runs in one event loop: that of the caller (`open`, `close`), or of a thread of the store
(`start_thread`, `stop`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import select
import socket
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from hororing._job import limits, threads
from hororing._job.rendezvous import protocol
from hororing._job.rendezvous.client import keep_from_children, keep_watch
from hororing._job.rendezvous.protocol import Hello, ProtocolError

_FIRST_S = 3.0
_PLACES, _SHARE_OF_FILES = 4096, 4  # at most, and at most one of so many files
_BACKLOG = 4096
_NO_FILES_S = 0.1  # before the next try, when the process has no file descriptors left
_START_S = 30.0
_CLOSE_S = 2.0
_AGAIN_S = 0.1


class Refusal(Exception):
    """Why a process is not admitted; the text is sent to it."""

    def __init__(self, text: str, again: bool = False) -> None:
        """`again`: it may try again, because another store will replace this one."""
        super().__init__(text)
        self.again = again


@dataclass(eq=False)
class _Place:
    """A connection that has proved nothing yet."""

    writer: asyncio.StreamWriter
    address: str  # of the other side


@dataclass(eq=False)
class Peer:
    """A member and its connection."""

    hello: Hello
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    done: int | None = None  # status, once it was reported

    def send(self, frame: bytes) -> None:
        """Send it later, if the connection is still open. Never blocks."""
        if not self.writer.is_closing():
            self.writer.write(frame)


class Server:
    """The server of one job. Subclasses define the requests of its members.

    Parameters
    ----------
    job : its name; members of other jobs are refused.
    secret : of `protocol.new_secret`; b"" admits every peer, and is a ValueError unless `insecure`.
    host : address to listen on; "": all addresses of this host, IPv4 and IPv6.
    port : 0 for a free one.

    Attributes
    ----------
    port : where it listens, once it is open.
    """

    def __init__(
        self, *, job: str, secret: bytes, host: str = "127.0.0.1", port: int = 0,
        insecure: bool = False,
    ) -> None:  # fmt: skip
        protocol.check_secret(secret, insecure)
        self.job, self.host, self.port = job, host, port
        self._secret = secret
        self._closing = False
        self._listener: socket.socket | None = None
        self._reserve: int | None = None  # a descriptor, to refuse newcomers when none is left
        self._out_of_files = False
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._places: dict[str, dict[_Place, None]] = {}  # by address; oldest first
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Lock()

    # -----------------------------------------------------------------------------------------
    # Implemented by subclasses; called in the event loop, except `_connections`

    def _connections(self) -> int:
        """Return how many the job has at its start, with all its members."""
        raise NotImplementedError

    def _members(self) -> list[Peer]:
        """Return the peers whose last messages must be sent before the store ends."""
        raise NotImplementedError

    def _enter(self, peer: Peer) -> None:
        """Admit and welcome a peer that has proved that it belongs to the job; or raise Refusal."""
        raise NotImplementedError

    async def _serve_member(self, peer: Peer) -> None:
        """Serve a member until it reports its end, or its connection ends."""
        while peer.done is None:
            self._answer(peer, await read(peer.reader, protocol.MAX_BYTES))

    def _answer(self, peer: Peer, message: dict[str, Any]) -> None:
        """Carry out a request. ProtocolError ends the connection."""
        raise NotImplementedError

    def _ended(self, peer: Peer) -> None:
        """Its connection has ended."""
        raise NotImplementedError

    # -----------------------------------------------------------------------------------------
    # Life

    def listen(self) -> None:
        """Bind and listen. OSError if the address is in use, or is not of this host.

        LimitError (also an OSError) if this process may not open a file for each connection.
        """
        limits.make_room(self._connections(), f"the {self._connections()} connections of the store")
        self._listener = _listen(self.host, self.port)
        self._reserve = os.open(os.devnull, os.O_RDONLY)
        keep_from_children(self._listener)
        self.port = self._listener.getsockname()[1]
        if not self._secret:
            logging.getLogger("hororing").warning(
                "the store at port %d has no secret (HORORING_INSECURE=1): any process that can "
                "connect can take part, and nothing that ranks send is unpickled",
                self.port,
            )

    async def open(self) -> None:
        """Admit members from now on."""
        if self._listener is None:
            self.listen()
        self._accepting = asyncio.ensure_future(self._accept())

    async def close(self) -> None:
        """Close every connection, and stop listening."""
        self._closing = True
        writers = [peer.writer for peer in self._members()]
        while tasks := [
            each for each in (self._accepting, *self._serving) if each and not each.done()
        ]:
            for task in tasks:
                task.cancel()
            # Then again: wait_for of Python 3.11 forgets it if its result comes at the same time.
            await asyncio.wait(tasks, timeout=_AGAIN_S)
        closed = [asyncio.ensure_future(writer.wait_closed()) for writer in writers]
        if closed:  # the last messages must still reach them
            await asyncio.wait(closed, timeout=_CLOSE_S)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def start_thread(self) -> None:
        """Open it in its own thread; returns when members can connect."""
        if self._listener is None:
            self.listen()
        loop = asyncio.new_event_loop()
        self._loop = loop
        self._thread = threads.start(
            threading.Thread(target=_run, args=(loop,), name="hororing-store", daemon=True)
        )
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
            try:
                accepted, address = await loop.sock_accept(self._listener)
            except OSError as error:  # or the peer has gone already
                if error.errno in (errno.EMFILE, errno.ENFILE) and _is_ready(self._listener):
                    await self._make_room()
                await asyncio.sleep(_NO_FILES_S)
                continue
            if sum(map(len, self._places.values())) >= _most_places():
                self._drop_one()
            try:
                await self._begin(accepted, address[0])
            except OSError:
                accepted.close()

    async def _make_room(self) -> None:
        """One waits, and no file descriptor is left: drop a stranger, or else refuse it."""
        text = (
            f"the store has no file descriptors left: its process may open {limits.files()} "
            f"(ulimit -n), and {len(self._members())} connections of ranks are open"
        )
        if not self._out_of_files:
            self._out_of_files = True
            logging.getLogger("hororing").error(text)
        if self._places:
            self._drop_one()
            return
        if self._reserve is None or self._listener is None:
            return
        os.close(self._reserve)
        self._reserve = None
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError), self._listener.accept()[0] as accepted:
            accepted.setblocking(False)
            await loop.sock_sendall(accepted, protocol.encode({"refused": text}))
        with contextlib.suppress(OSError):
            self._reserve = os.open(os.devnull, os.O_RDONLY)

    async def _begin(self, accepted: socket.socket, address: str) -> None:
        loop = asyncio.get_running_loop()
        keep_watch(accepted)
        reader = asyncio.StreamReader(limit=protocol.FIRST_BYTES)
        made = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: made, accepted)
        writer = asyncio.StreamWriter(transport, made, reader, loop)
        place = _Place(writer, address)
        self._places.setdefault(address, {})[place] = None
        task = asyncio.ensure_future(self._serve(reader, writer, place))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    def _drop_one(self) -> None:
        if self._places:
            most = max(self._places, key=lambda address: len(self._places[address]))
            oldest = next(iter(self._places[most]))
            self._leave(oldest)
            oldest.writer.transport.abort()

    def _leave(self, place: _Place) -> None:
        there = self._places.get(place.address, {})
        there.pop(place, None)
        if not there:
            self._places.pop(place.address, None)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: _Place
    ) -> None:
        peer = None
        try:
            peer = await asyncio.wait_for(self._admit(reader, writer, place), _FIRST_S)
            await self._serve_member(peer)
        except Refusal as refusal:
            with contextlib.suppress(ValueError):
                answer = {"refused": str(refusal), "again": refusal.again}
                writer.write(protocol.encode(answer))
        except (ProtocolError, OSError, EOFError, asyncio.TimeoutError):
            pass
        finally:
            self._leave(place)
            if peer is not None and not self._closing:  # or it would be the store that ends
                self._ended(peer)
            writer.close()

    async def _admit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: _Place
    ) -> Peer:
        nonce = protocol.new_nonce()
        writer.write(protocol.encode({"nonce": nonce}))
        first = await read(reader, protocol.FIRST_BYTES)
        hello = protocol.parse_hello(first)
        if hello.job != self.job:
            raise Refusal("this is the store of another job")
        if not protocol.is_proof(first.get("proof"), self._secret, protocol.MEMBER, nonce, hello):
            writer.write(protocol.encode({"proof": ""}))  # so that an honest member knows why
            raise ProtocolError("a wrong proof")
        proof = protocol.proof(self._secret, protocol.STORE, nonce, hello)
        writer.write(protocol.encode({"proof": proof}))
        peer = Peer(hello, reader, writer)
        self._enter(peer)  # only now: only peers that know the secret may learn of the members
        self._leave(place)
        return peer


async def read(reader: asyncio.StreamReader, most: int) -> dict[str, Any]:
    """Read a frame of at most `most` bytes."""
    head = await reader.readexactly(protocol.LENGTH_BYTES)  # IncompleteReadError is an EOFError
    return protocol.decode(await reader.readexactly(protocol.length(head, most)))


def _most_places() -> int:
    return min(_PLACES, limits.files() // _SHARE_OF_FILES)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


def _is_ready(listener: socket.socket) -> bool:
    """Whether a connection waits; accept needs a free descriptor even if none does."""
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    return bool(waiting.poll(0))


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
