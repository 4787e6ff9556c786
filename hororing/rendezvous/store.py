"""The server: the ranks of a job, and the few texts that they exchange.

A connection is a membership: when it ends and the member has not said DONE, the rank is lost. Then
ranks that wait for it are told, and so are ranks that would wait later. Keys live under a
generation; there is one here, 0 (`elastic_store` has more). Nothing polls: a GET or a GATHER is
answered when it can be, or at its deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hororing.rendezvous import protocol
from hororing.rendezvous.exchange import Exchange
from hororing.rendezvous.server import Peer, Refusal, Server


class Store(Server):
    """The server of one job of `size` ranks that come once.

    Parameters
    ----------
    job, secret, host, port, insecure : as those of `Server`.
    size : how many ranks there are.
    one_start : it ends with the processes of this start, since one of them has it: a rank that has
        ended does not come again, and a process that claims its rank is of a later start.
    when_complete : called once, when all ranks are in and before any of them is told anything.

    Attributes
    ----------
    port : where it listens, once it is open.
    statuses : what ranks have said with DONE.
    lost : ranks whose connection ended without that, and what is said of them.
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
        super().__init__(job=job, secret=secret, host=host, port=port, insecure=insecure)
        self.size = size
        self._one_start, self._when_complete = one_start, when_complete
        self._peers: dict[int, Peer] = {}
        self._exchange = Exchange(0, size, self._peers)
        self.statuses, self.lost = self._exchange.statuses, self._exchange.lost

    def _members(self) -> list[Peer]:
        return list(self._peers.values())

    def _enter(self, peer: Peer) -> None:
        hello = peer.hello
        if hello.size != self.size:
            raise Refusal(
                f"{hello.title()} belongs to a job of {hello.size} ranks, but this has {self.size}"
            )
        there = self._peers.get(hello.rank)
        if there is not None:
            raise Refusal(f"{hello.title()} claims the rank of {there.hello.title()}")
        if hello.rank in self.lost:
            raise Refusal(
                f"{hello.title()} is too late: {self.lost[hello.rank]}", again=self._one_start
            )
        if self._one_start and hello.rank in self.statuses:
            raise Refusal(f"rank {hello.rank} of this job has ended", again=True)
        self._peers[hello.rank] = peer
        self.statuses.pop(hello.rank, None)
        if len(self._peers) == self.size:
            complete, self._when_complete = self._when_complete, lambda: None
            complete()
        peer.send(protocol.encode({"welcome": True}))

    def _ended(self, peer: Peer) -> None:
        del self._peers[peer.hello.rank]
        who = f"{peer.hello.title()} closed its connection unexpectedly"
        self._exchange.end(peer.hello.rank, peer, peer.done, who)

    def _answer(self, peer: Peer, message: dict[str, Any]) -> None:
        what = protocol.take(message, "do", str)
        if what == "done":
            peer.done = protocol.take(message, "status", int)
            peer.send(protocol.encode({"done": True}))
        else:
            self._exchange.answer(peer.hello.rank, peer, what, message)
