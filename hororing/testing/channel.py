"""Messages between the process of the tests and its ranks: pickles over a pair of sockets.

Neither end has a name that another process could open, so both ends are ours and are trusted.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

_HEAD = struct.Struct("!Q")
_MOST_FILES = 250  # the kernel allows 253


class Closed(Exception):
    """The other process has ended, or closed its end."""


class Channel:
    """One end."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, message: object, files: Sequence[int] = ()) -> None:
        """Send a message, and copies of descriptors. Closed if nobody can get it."""
        body = pickle.dumps(message)
        try:
            socket.send_fds(self._socket, [_HEAD.pack(len(body))], files)
            self._socket.sendall(body)
        except OSError as error:
            raise Closed from error

    def receive(self, limit_s: float | None = None) -> tuple[Any, list[int]]:
        """Wait for a message; return it, and the descriptors. Closed; TimeoutError at the limit."""
        self._socket.settimeout(limit_s)
        try:
            head, files, _, _ = socket.recv_fds(
                self._socket, _HEAD.size, _MOST_FILES, socket.MSG_CMSG_CLOEXEC
            )
            head += self._exactly(_HEAD.size - len(head)) if head else b""
            if not head:
                raise Closed
            return pickle.loads(self._exactly(*_HEAD.unpack(head))), files
        except TimeoutError:
            raise
        except OSError as error:
            raise Closed from error
        finally:
            self._socket.settimeout(None)

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            more = self._socket.recv(min(count - len(data), 2**20))
            if not more:
                raise Closed
            data += more
        return bytes(data)

    def fileno(self) -> int:
        """The descriptor, to wait for messages with a selector."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def pair() -> tuple[Channel, socket.socket]:
    """Return two connected ends, of which the second is for another process."""
    mine, other = socket.socketpair()
    return Channel(mine), other
