"""The texts that the ranks of one generation share through the store.

A rank that has sent its text is answered when all have. At the first deadline of a rank, all that
wait get the same error: who leaves because of it is not to blame. Once a rank is lost, ranks that
wait, now or later, get an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hororing._job.rendezvous import protocol
from hororing._job.rendezvous.protocol import ProtocolError
from hororing._job.rendezvous.server import Peer


@dataclass(eq=False)
class _Wait:
    """A rank that has sent its text."""

    peer: Peer
    deadline: asyncio.TimerHandle | None

    def cancel(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()

    def end(self, frame: bytes) -> None:
        self.cancel()
        self.peer.send(frame)


@dataclass(eq=False)
class _Gather:
    """The texts so far, and the ranks that wait for the others."""

    texts: dict[int, str] = field(default_factory=dict)
    waits: dict[int, _Wait] = field(default_factory=dict)


class Exchange:
    """The exchange of `size` ranks; in the event loop of the store.

    Attributes
    ----------
    lost : the reasons for lost ranks, by rank; then nothing can be gathered any more.
    statuses : the exit statuses of ranks that have ended normally.
    missed : the error of the last exchange, for which ranks did not come in time; "": it was
        complete.
    """

    def __init__(self, generation: int, size: int, peers: Mapping[int, Peer]) -> None:
        """`peers`: the connected peers, by rank; the store changes it."""
        self.lost: dict[int, str] = {}
        self.statuses: dict[int, int] = {}
        self._generation, self._size, self._peers = generation, size, peers
        self.missed = ""
        self._gathers: dict[str, _Gather] = {}

    def answer(self, rank: int, peer: Peer, what: str, message: dict[str, Any]) -> None:
        """Carry out a request of a rank: "gather"."""
        key = protocol.take(message, "key", str)
        if len(key) > protocol.FIRST_BYTES:
            raise ProtocolError("a key that is too long")
        text = protocol.take(message, "text", str)
        if len(text) > protocol.TEXT_CHARACTERS:
            raise ProtocolError("a text that is too long")
        if what != "gather":
            raise ProtocolError("an unknown request")
        if protocol.take(message, "generation", int) != self._generation:
            peer.send(_reply(key, {"error": "that generation is over"}))
        else:
            self._gather(rank, peer, key, text, message)

    def end(self, rank: int, status: int | None, who: str, *, may_return: bool = False) -> None:
        """A rank has left: with a status if it ended normally, otherwise it is lost.

        `may_return`: ranks go on waiting for it if it ended normally.
        """
        if status is None:
            self.lost[rank] = who
        else:
            self.statuses[rank] = status
        for key, gather in list(self._gathers.items()):
            if rank in gather.waits:
                gather.waits.pop(rank).cancel()
            if status is None or not (may_return or rank in gather.texts):
                del self._gathers[key]
                for wait in gather.waits.values():
                    wait.end(self._gone(key, rank))

    def _gather(self, rank: int, peer: Peer, key: str, text: str, message: dict[str, Any]) -> None:
        if self.lost:
            peer.send(self._gone(key, next(iter(self.lost))))
            return
        gather = self._gathers.setdefault(key, _Gather())
        earlier = gather.waits.pop(rank, None)
        if earlier is not None:  # a wait that was interrupted
            earlier.cancel()
        gather.texts[rank] = text
        asks_again = message.get("again") is True

        def missed() -> None:
            # A rank that gives up does not take part: all ranks get the texts, or none does.
            missing = [each for each in range(self._size) if each not in gather.texts]
            error = self._missing(missing)
            ended = gather.waits
            if asks_again:
                ended = {rank: gather.waits.pop(rank)}
                del gather.texts[rank]
            else:
                self.missed = error
                del self._gathers[key]
            for each in ended.values():
                each.end(_reply(key, {"error": error, "missing": True}))

        wait = self._wait(peer, message, missed)
        gather.waits[rank] = wait
        if len(gather.texts) == self._size:
            del self._gathers[key]
            self.missed = ""
            frames = _texts(key, [gather.texts[each] for each in range(self._size)])
            for each in gather.waits.values():
                each.end(frames)

    def _wait(self, peer: Peer, message: dict[str, Any], missed: Callable[[], None]) -> _Wait:
        timeout_s = message.get("timeout_s")
        if timeout_s is None:
            return _Wait(peer, None)
        timeout_s = protocol.take(message, "timeout_s", float)
        return _Wait(peer, asyncio.get_running_loop().call_later(max(timeout_s, 0.0), missed))

    def _missing(self, ranks: list[int]) -> str:
        """Describe the missing ranks, and which of them have at least connected."""
        here = [rank for rank in ranks if rank in self._peers]
        away = [rank for rank in ranks if rank not in self._peers]
        parts = []
        if away:
            parts.append(f"{_ranks(away)} did not connect, or ended before")
        if here:
            named = ", ".join(self._peers[rank].hello.title() for rank in here[:8])
            parts.append(f"{_ranks(here)} connected, but did not get here: {named}")
        return "; ".join(parts)

    def _gone(self, key: str, rank: int) -> bytes:
        if self.missed:  # why this rank has left
            return _reply(key, {"error": self.missed})
        if rank in self.lost:
            text = self.lost[rank]
        else:
            text = f"rank {rank} has ended with status {self.statuses.get(rank)}"
        return _reply(key, {"error": text, "rank": rank})


def _reply(key: str, what: dict[str, Any]) -> bytes:
    """The frame of an answer about a key."""
    return protocol.encode({"key": key, **what})


def _texts(key: str, texts: list[str]) -> bytes:
    """The frames with all ranks' texts: each holds some of them, from rank "first" on."""
    frames, part, size = [], [], 0
    for rank, text in enumerate(texts):
        part.append(text)
        size += protocol.CHARACTER_BYTES * len(text) + 4  # quotes and a comma
        if size > protocol.MAX_BYTES // 4:
            frames.append(_reply(key, {"first": rank + 1 - len(part), "texts": part}))
            part, size = [], 0
    return b"".join([*frames, _reply(key, {"first": len(texts) - len(part), "texts": part})])


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown})"
