"""The connection of a rank to the store: it shows that the rank is alive, and carries requests.

Blocking, for any thread; one request at a time. A forked child does not use it.
"""

from __future__ import annotations

import errno
import hmac
import math
import os
import secrets
import select
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, repeat
from typing import Any

from hororing._job.rendezvous import protocol
from hororing._job.rendezvous.interfaces import with_scope
from hororing._job.rendezvous.patience import Patience
from hororing._job.rendezvous.protocol import Frames, Hello, ProtocolError

_RETRY_S = (0.02, 0.5)  # first and last pause between two attempts to connect
# Time limit of one attempt at all addresses, and the time before the next address is tried, too: a
# network may silently drop packets to one of them.
_CONNECT_S, _ALONE_S = 2.0, 0.1
_HANDSHAKE_S = 5.0  # longer than the store waits
_ANSWER_S = 10.0  # for the store, beyond the deadline that the store watches itself
_DONE_S = 5.0
_RECEIVE_BYTES = 2**16
_MOST_CHARACTERS = 1000  # of a refusal, which any server may send


class RendezvousError(Exception):
    """The ranks cannot find one another.

    Attributes
    ----------
    rank : the rank to blame; -1: none, or unknown.
    refused : the store does not admit this process, now or later.
    """

    def __init__(self, text: str, rank: int = -1, refused: bool = False) -> None:
        super().__init__(text)
        self.rank = rank
        self.refused = refused


class _MissingError(RendezvousError):
    """Ranks did not come in time."""


class _Refused(Exception):
    pass


class _NotYet(Exception):
    """Refused by the store of an earlier start, which will end."""


class Deadline:
    """A moment of the monotonic clock."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` from now; infinite: never."""
        self._end = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds until then, at least 0."""
        return max(self._end - time.monotonic(), 0.0)


class _Stream:
    """Frames over a socket, with a deadline for each call."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._frames = Frames()
        self._messages: deque[dict[str, Any]] = deque()

    def send(self, message: dict[str, Any], deadline: Deadline) -> None:
        frame = protocol.encode(message)
        self._arm(deadline)
        self.socket.sendall(frame)

    def receive(self, deadline: Deadline) -> dict[str, Any]:
        """OSError (TimeoutError too), EOFError, ProtocolError."""
        while not self._messages:
            self._arm(deadline)
            part = self.socket.recv(_RECEIVE_BYTES)
            if not part:
                raise EOFError("it has closed the connection")
            self._messages.extend(self._frames.feed(part))
        return self._messages.popleft()

    def is_ready(self, timeout_s: float) -> bool:
        """Wait for something to receive, for at most `timeout_s`."""
        waiting = select.poll()
        waiting.register(self.socket, select.POLLIN)
        return bool(self._messages or waiting.poll(1000 * timeout_s))

    def _arm(self, deadline: Deadline) -> None:
        left_s = deadline.left_s()
        if left_s == 0:
            raise TimeoutError("no answer in time")
        self.socket.settimeout(None if math.isinf(left_s) else left_s)


class Member:
    """A rank of a job, as a member of the store.

    Blocks until the store has admitted it. The store may start later.

    Parameters
    ----------
    address : ``host:port``; several, separated by commas, are tried in this order, the next one
        soon after the last.
    secret : of the job; b"": none, which is a ValueError unless `insecure` is set.
    job, rank, size : the job's name, this rank, and the number of ranks.
    uid : of a process without a rank (rank -1, size 0); see `elastic_member.ElasticMember`.
    host : name of this host in error texts; None: its own.
    timeout_s : how long to try; infinite: forever.
    patience : says from time to time why there is no store yet.

    Attributes
    ----------
    address : the address of the store.
    generation : the one in which it has this rank; always 0 if the job is not elastic.
    local_address : address of this host from which the store is reached, without a port.
    proven : the members have proved to one another that they know the secret.
    at_close : functions that `close` calls afterwards, such as the end of a store in this process.

    Raises
    ------
    RendezvousError : no store answered in time, or it does not admit this process.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: bytes,
        job: str,
        rank: int,
        size: int,
        uid: str = "",
        host: str | None = None,
        timeout_s: float = 60.0,
        insecure: bool = False,
        patience: Patience | None = None,
    ) -> None:
        self.job, self.rank, self.size, self.uid = job, rank, size, uid
        self.generation = 0
        self.host = socket.gethostname() if host is None else host
        self.address = address
        self.local_address = ""
        self.proven = bool(secret)
        self._mesh_key = hmac.new(secret, b"mesh", "sha256").hexdigest() if secret else ""
        self.at_close: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._shares = 0
        self._stream: _Stream | None = None
        self._patience = patience or Patience()
        places = {text: protocol.parse_address(text) for text in address.split(",")}
        protocol.check_secret(secret, insecure)
        self._stream, self.address = self._connect(places, secret, timeout_s)
        self.local_address = with_scope(self._stream.socket.getsockname())
        _members.add(self)

    # -----------------------------------------------------------------------------------------
    # Requests

    @property
    def mesh_key(self) -> str:
        """Proves to other ranks that this one belongs to this generation of the job."""
        key, number = self._mesh_key.encode(), str(self.generation).encode()
        return hmac.new(key, number, "sha256").hexdigest() if key else ""

    def share(self, text: str, timeout_s: float = math.inf) -> list[str]:
        """Send `text`, and return the texts of all ranks, in rank order.

        Blocks until every rank has called it. All ranks must make the same number of calls that
        return: after an error or an interrupt, repeat the call. A text has at most
        `protocol.TEXT_CHARACTERS` characters.

        Raises
        ------
        RendezvousError : some ranks did not call it in time, or a rank or the store has ended.
        """
        if len(text) > protocol.TEXT_CHARACTERS:
            raise ValueError(f"a text of {len(text)} characters, of {protocol.TEXT_CHARACTERS}")
        patience, end = Patience(), Deadline(timeout_s)
        with self._lock:
            while True:
                # Rank 0 asks again and again, because only the store knows who is missing.
                most_s = patience.left_s() if self.rank == 0 else math.inf
                try:
                    again = end.left_s() > most_s
                    texts = self._gather(text, most_s if again else end.left_s(), again)
                except _MissingError as error:
                    if not again or end.left_s() == 0:
                        raise
                    patience.say("rank 0", f"the others: {error}")
                else:
                    self._shares += 1
                    return texts

    def _gather(self, text: str, timeout_s: float, again: bool) -> list[str]:
        key = f"share {self._shares}"
        deadline = self._send_text(key, text, timeout_s, again)
        texts: list[str] = []
        while len(texts) < self.size:
            message = self._next(key, deadline)
            if message.get("first") != len(texts):
                raise self._failed(ProtocolError("a part of the answer is missing"))
            texts += self._take(message, "texts", list)
        return texts

    def done(self, status: int = 0) -> None:
        """Report that this rank ends normally, and close. Raises nothing if the store is lost."""
        with self._lock:
            if self._stream is not None:
                deadline = Deadline(_DONE_S)
                try:
                    self._stream.send({"do": "done", "status": status}, deadline)
                    while "done" not in self._stream.receive(deadline):
                        pass
                except (OSError, EOFError, ProtocolError):
                    pass
            self.close()

    def close(self) -> None:
        """End the connection; without `done` this rank then counts as lost."""
        self.drop()
        while self.at_close:
            self.at_close.pop(0)()

    def drop(self) -> None:
        """Close the socket only, as in a forked child."""
        if self._stream is not None:
            self._stream.socket.close()
            self._stream = None

    def _send_text(self, key: str, text: str, timeout_s: float, again: bool = False) -> Deadline:
        """`again`: at the end of its time, this rank does not give up, but asks again."""
        deadline = Deadline(timeout_s + _ANSWER_S)
        request = {"do": "gather", "generation": self.generation, "key": key, "text": text}
        if again:
            request["again"] = True
        if math.isfinite(timeout_s):
            request["timeout_s"] = timeout_s
        self._send(request, deadline)
        return deadline

    def _send(self, message: dict[str, Any], deadline: Deadline) -> None:
        if self._stream is None:
            raise RendezvousError(f"{self._name()} has lost its connection to the store")
        try:
            self._stream.send(message, deadline)
        except OSError as error:
            raise self._failed(error) from None

    def _receive(self, deadline: Deadline) -> dict[str, Any]:
        assert self._stream is not None
        try:
            return self._stream.receive(deadline)
        except (OSError, EOFError, ProtocolError) as error:
            raise self._failed(error) from None

    def _take(self, message: dict[str, Any], name: str, kind: type) -> Any:
        try:
            return protocol.take(message, name, kind)
        except ProtocolError as error:
            raise self._failed(error) from None

    def _next(self, key: str, deadline: Deadline) -> dict[str, Any]:
        """Return the next message about `key`. Skips answers to abandoned requests."""
        while True:
            message = self._receive(deadline)
            if message.get("key") != key:
                continue
            if "missing" in message:
                raise _MissingError(str(message.get("error")))
            if "error" in message:
                rank = message.get("rank", -1)
                raise RendezvousError(str(message["error"]), rank if type(rank) is int else -1)
            return message

    def _name(self) -> str:
        return f"rank {self.rank}" if self.rank >= 0 else f"process {os.getpid()}"

    def _failed(self, error: Exception) -> RendezvousError:
        self.drop()
        return RendezvousError(f"the store at {self.address} is lost: {_reason(error)}")

    # -----------------------------------------------------------------------------------------
    # Connecting

    def _connect(
        self,
        places: dict[str, tuple[str, int]],
        secret: bytes,
        timeout_s: float,
        beats: bool = False,
    ) -> tuple[_Stream, str]:
        deadline = Deadline(timeout_s)
        pause_s = _RETRY_S[0]
        reasons: dict[str, str] = {}
        while True:
            connect_s = max(min(deadline.left_s(), _CONNECT_S), 1e-3)
            for text, made in _connections(places, Deadline(connect_s)):
                try:
                    if isinstance(made, OSError):
                        raise made
                    meet_s = min(deadline.left_s(), _HANDSHAKE_S)
                    return self._meet(made, secret, beats, Deadline(meet_s)), text
                except (_Refused, ProtocolError) as error:
                    if len(places) == 1:
                        raise RendezvousError(
                            f"the store at {text}: {error}", refused=isinstance(error, _Refused)
                        ) from None
                    reasons[text] = str(error)
                except (OSError, EOFError, _NotYet) as error:
                    reasons[text] = _reason(error)
            who = f"{self._name()} on host {self.host}"
            why = "; ".join(f"{text}: {reason}" for text, reason in reasons.items())
            if deadline.left_s() == 0:
                raise RendezvousError(
                    f"{who} found no store of its job within {timeout_s:g} s; {why}"
                )
            self._patience.say(who, f"the store of its job: {why}")
            # Ranks that start together must not retry together.
            time.sleep(min(secrets.SystemRandom().uniform(0.5, 1) * pause_s, deadline.left_s()))
            pause_s = min(2 * pause_s, _RETRY_S[1])

    def _meet(
        self, connection: socket.socket, secret: bytes, beats: bool, deadline: Deadline
    ) -> _Stream:
        try:
            keep_watch(connection)
            stream = _Stream(connection)
            self._introduce(stream, secret, beats, deadline)
        except BaseException:
            connection.close()
            raise
        return stream

    def _introduce(self, stream: _Stream, secret: bytes, beats: bool, deadline: Deadline) -> None:
        nonce = protocol.new_nonce()
        hello = Hello(
            self.job, self.rank, self.size, self.host, os.getpid(), nonce, self.uid, beats
        )
        theirs = protocol.take(_accepted(stream.receive(deadline)), "nonce", str)
        mine = protocol.proof(secret, protocol.MEMBER, theirs, hello)
        stream.send({**hello.message(), "proof": mine}, deadline)
        claimed = _accepted(stream.receive(deadline)).get("proof")
        if not protocol.is_proof(claimed, secret, protocol.STORE, theirs, hello):
            raise ProtocolError(
                "the server there does not have the secret of this job: give every rank, and the "
                "store, the same one; without one, all must be processes of one user on one host"
            )
        protocol.take(_accepted(stream.receive(deadline)), "welcome", bool)


def _connections(
    places: Mapping[str, tuple[str, int]], deadline: Deadline
) -> Iterator[tuple[str, socket.socket | OSError]]:
    """Yield the outcome of each place as it becomes known, until the deadline."""
    with selectors.DefaultSelector() as selector:
        try:
            for text, begun, at in chain(_begun(places), repeat(("", None, ""))):
                if isinstance(begun, OSError):
                    yield text, begun
                    continue
                left_s = deadline.left_s()
                if begun is not None:
                    selector.register(begun, selectors.EVENT_WRITE, (text, begun, at))
                    wait_s = min(left_s, _ALONE_S)
                elif selector.get_map():
                    wait_s = left_s
                else:
                    return
                for key, _ in selector.select(wait_s):
                    selector.unregister(key.fileobj)
                    yield key.data[0], _connected(key.data[1], key.data[2])
                if left_s == 0:
                    for key in selector.get_map().values():
                        yield key.data[0], TimeoutError(f"timed out{key.data[2]}")
                    return
        finally:
            for key in selector.get_map().values():
                key.data[1].close()


def _begun(
    places: Mapping[str, tuple[str, int]],
) -> Iterator[tuple[str, socket.socket | OSError, str]]:
    """Begin a connection with each address; the last text is the address if a name was given."""
    for text, (host, port) in places.items():
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            yield text, error, ""
            continue
        for family, _, _, _, address in found:
            at = "" if address[0] == host else f" ({address[0]})"
            yield text, _begin(family, address, at), at


def _begin(family: int, address: Any, at: str) -> socket.socket | OSError:
    try:
        begun = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:  # IPv6 that is turned off
        return error
    begun.setblocking(False)
    code = begun.connect_ex(address)
    if code in (0, errno.EINPROGRESS):
        return begun
    begun.close()
    return OSError(code, os.strerror(code) + at)


def _connected(begun: socket.socket, at: str) -> socket.socket | OSError:
    code = begun.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code == 0 and begun.getsockname() == begun.getpeername():
        # If no process listens on a port of this host, this very socket may have got that port.
        code = errno.ECONNREFUSED
    if code == 0:
        return begun
    begun.close()
    return OSError(code, os.strerror(code) + at)


def keep_watch(connection: socket.socket) -> None:
    """Let the kernel end a connection whose other host is gone, within 20 s, or this process."""
    keep_from_children(connection)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)


def _accepted(answer: dict[str, Any]) -> dict[str, Any]:
    if "refused" in answer:
        text = protocol.printable(str(answer["refused"])[:_MOST_CHARACTERS])
        raise (_NotYet if answer.get("again") else _Refused)(text)
    return answer


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


# A forked child would keep the port of a store, and the connection of a rank, that have died.
_members: weakref.WeakSet[Member] = weakref.WeakSet()
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def keep_from_children(one: socket.socket) -> None:
    """Close it in every child that this process forks. A program that it starts never has it."""
    _sockets.add(one)


def _drop_all() -> None:
    for member in list(_members):
        member.drop()
        member.at_close.clear()  # of the parent: the store is a thread there
    for each in list(_sockets):
        each.close()


os.register_at_fork(after_in_child=_drop_all)
