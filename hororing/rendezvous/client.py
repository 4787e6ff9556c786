"""The connection of one rank to the store: it says that the rank lives, and carries its requests.

Blocking, for any thread; one request at a time. A child that a rank forks has no part in it.
"""

from __future__ import annotations

import hmac
import math
import os
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from hororing.rendezvous import protocol
from hororing.rendezvous.protocol import Frames, Hello, ProtocolError

_RETRY_S = (0.02, 0.5)  # first and last pause between two tries to connect
_CONNECT_S = 5.0  # one try, where there are several addresses
_HANDSHAKE_S = 5.0  # longer than the store waits
_ANSWER_S = 10.0  # for the store, beyond the deadline that it watches itself
_DONE_S = 5.0
_RECEIVE_BYTES = 2**16


class RendezvousError(Exception):
    """The ranks cannot find one another.

    Attributes
    ----------
    rank : the rank that is to blame; -1: none, or it is not known.
    refused : the store does not let this process in, and will not later.
    """

    def __init__(self, text: str, rank: int = -1, refused: bool = False) -> None:
        super().__init__(text)
        self.rank = rank
        self.refused = refused


class _Refused(Exception):
    pass


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

    def _arm(self, deadline: Deadline) -> None:
        left_s = deadline.left_s()
        if left_s == 0:
            raise TimeoutError("no answer in time")
        self.socket.settimeout(None if math.isinf(left_s) else left_s)


class Member:
    """A rank of a job, as the store knows it.

    Blocks until the store has let it in. The store may start later.

    Parameters
    ----------
    address : ``host:port``; several with commas between them are tried in turn.
    secret : of the job; b"" where there is none, which is a ValueError unless the address is of
        this host alone or `insecure`.
    job, rank, size : the job's name, which rank this is, and of how many.
    host : name of this host in error texts; None: its own.
    timeout_s : how long to try; infinite: for ever.

    Attributes
    ----------
    address : where the store is.
    mesh_key : proves to other ranks that this one belongs to the job; "" without a secret.
    local_address : address of this host from which the store is reached, without a port.
    at_close : what `close` calls afterwards, such as the end of a store in this process.

    Raises
    ------
    RendezvousError : no store there in time, or it does not let this process in.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: bytes,
        job: str,
        rank: int,
        size: int,
        host: str | None = None,
        timeout_s: float = 60.0,
        insecure: bool = False,
    ) -> None:
        self.job, self.rank, self.size = job, rank, size
        self.host = socket.gethostname() if host is None else host
        self.address = address
        self.local_address = ""
        self.mesh_key = hmac.new(secret, b"mesh", "sha256").hexdigest() if secret else ""
        self.at_close: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._shares = 0
        self._stream: _Stream | None = None
        places = {text: protocol.parse_address(text) for text in address.split(",")}
        for place in places.values():
            protocol.check_secret(secret, place[0], insecure)
        self._connect(places, secret, timeout_s)
        _members.add(self)

    # -----------------------------------------------------------------------------------------
    # Requests

    def share(self, text: str, timeout_s: float = math.inf) -> list[str]:
        """Tell `text`, and return the texts of all ranks in their order.

        Blocks until every rank has called it. All must call it equally often, of which only calls
        that return count: after an error or an interruption it is repeated. A text has at most
        `protocol.TEXT_CHARACTERS` characters.

        Raises
        ------
        RendezvousError : some ranks did not come in time, or one has ended, or the store has.
        """
        with self._lock:
            key = f"share {self._shares}"
            deadline = self._ask("gather", key, timeout_s, text=_checked(text))
            texts: list[str] = []
            while len(texts) < self.size:
                message = self._next(key, deadline)
                if message.get("first") != len(texts):
                    raise self._failed(ProtocolError("a part of the answer is missing"))
                texts += self._take(message, "texts", list)
            self._shares += 1
            return texts

    def put(self, key: str, text: str, timeout_s: float = _ANSWER_S) -> None:
        """Tell `text` to whoever asks for `key`, now or later."""
        with self._lock:
            deadline = self._ask("put", key, timeout_s, text=_checked(text))
            self._next(key, deadline)

    def get(self, key: str, timeout_s: float = math.inf) -> str:
        """Return the text of `key`; blocks until somebody has told it. RendezvousError if not."""
        with self._lock:
            deadline = self._ask("get", key, timeout_s)
            return str(self._take(self._next(key, deadline), "text", str))

    def done(self, status: int = 0) -> None:
        """Say that this rank ends as it should, and close. Nothing is raised without a store."""
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

    def _ask(self, what: str, key: str, timeout_s: float, **more: Any) -> Deadline:
        if self._stream is None:
            raise RendezvousError(f"rank {self.rank} has no connection to the store any more")
        deadline = Deadline(timeout_s + _ANSWER_S)
        request = {"do": what, "generation": 0, "key": key, **more}
        if math.isfinite(timeout_s):
            request["timeout_s"] = timeout_s
        try:
            self._stream.send(request, deadline)
        except OSError as error:
            raise self._failed(error) from None
        return deadline

    def _take(self, message: dict[str, Any], name: str, kind: type) -> Any:
        try:
            return protocol.take(message, name, kind)
        except ProtocolError as error:
            raise self._failed(error) from None

    def _next(self, key: str, deadline: Deadline) -> dict[str, Any]:
        """The next message about `key`. Answers to what was given up before are left out."""
        assert self._stream is not None
        while True:
            try:
                message = self._stream.receive(deadline)
            except (OSError, EOFError, ProtocolError) as error:
                raise self._failed(error) from None
            if message.get("key") != key:
                continue
            if "error" in message:
                rank = message.get("rank", -1)
                raise RendezvousError(str(message["error"]), rank if type(rank) is int else -1)
            return message

    def _failed(self, error: Exception) -> RendezvousError:
        self.drop()
        return RendezvousError(f"the store at {self.address} is lost: {_reason(error)}")

    # -----------------------------------------------------------------------------------------
    # Connecting

    def _connect(self, places: dict[str, tuple[str, int]], secret: bytes, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        pause_s = _RETRY_S[0]
        reason = "there was no time"
        while True:
            for text, place in places.items():
                left_s = deadline.left_s()
                connect_s = min(left_s, _CONNECT_S) if len(places) > 1 else left_s
                try:
                    self._stream = self._try(place, secret, connect_s)
                except (_Refused, ProtocolError) as error:
                    if len(places) == 1:
                        raise RendezvousError(
                            f"the store at {text}: {error}", refused=isinstance(error, _Refused)
                        ) from None
                    reason = f"{text}: {error}"
                except (OSError, EOFError) as error:
                    reason = f"{text}: {_reason(error)}"
                else:
                    self.address = text
                    self.local_address = self._stream.socket.getsockname()[0]
                    return
            if deadline.left_s() == 0:
                raise RendezvousError(
                    f"rank {self.rank} on host {self.host} found no store of its job within "
                    f"{timeout_s:g} s; {reason}"
                )
            # Ranks that start together must not come together again.
            time.sleep(min(secrets.SystemRandom().uniform(0.5, 1) * pause_s, deadline.left_s()))
            pause_s = min(2 * pause_s, _RETRY_S[1])

    def _try(self, place: tuple[str, int], secret: bytes, connect_s: float) -> _Stream:
        connection = socket.create_connection(
            place, timeout=None if math.isinf(connect_s) else max(connect_s, 1e-3)
        )
        try:
            keep_watch(connection)
            stream = _Stream(connection)
            self._introduce(stream, secret, Deadline(_HANDSHAKE_S))
        except BaseException:
            connection.close()
            raise
        return stream

    def _introduce(self, stream: _Stream, secret: bytes, deadline: Deadline) -> None:
        nonce = protocol.new_nonce()
        hello = Hello(self.job, self.rank, self.size, self.host, os.getpid(), nonce)
        stream.send(hello.message(), deadline)
        answer = _accepted(stream.receive(deadline))
        theirs = protocol.take(answer, "nonce", str)
        if not protocol.is_proof(answer.get("proof"), secret, protocol.STORE, theirs, hello):
            raise ProtocolError("what answers there does not have the secret of this job")
        mine = protocol.proof(secret, protocol.MEMBER, theirs, hello)
        stream.send({"proof": mine}, deadline)
        protocol.take(_accepted(stream.receive(deadline)), "welcome", bool)


def keep_watch(connection: socket.socket) -> None:
    """Let the kernel end a connection whose other host is gone, within 20 s."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)


def _checked(text: str) -> str:
    if len(text) > protocol.TEXT_CHARACTERS:
        raise ValueError(f"a text of {len(text)} characters, of {protocol.TEXT_CHARACTERS}")
    return text


def _accepted(answer: dict[str, Any]) -> dict[str, Any]:
    if "refused" in answer:
        raise _Refused(str(answer["refused"]))
    return answer


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


# A forked child would keep the connection of a rank that has died.
_members: weakref.WeakSet[Member] = weakref.WeakSet()


def _drop_all() -> None:
    for member in list(_members):
        member.drop()
        member.at_close.clear()  # of the parent: the store is a thread there


os.register_at_fork(after_in_child=_drop_all)
