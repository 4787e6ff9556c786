"""The server: the ranks of a job, and the few texts that they exchange.

A connection is a membership: if it ends before the member has sent DONE, the rank is lost, and
ranks that wait for it, now or later, get an error. Keys belong to a generation; here there is only
generation 0 (`elastic_store` has more). Nothing polls: a GET or a GATHER is answered when that is
possible, or at its deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hororing._job.rendezvous import protocol
from hororing._job.rendezvous.exchange import Exchange
from hororing._job.rendezvous.server import Peer, Refusal, Server


class Store(Server):
    """The server of one job of `size` ranks, each of which connects once.

    Parameters
    ----------
    job, secret, host, port, insecure : as those of `Server`.
    size : the number of ranks.
    one_start : the store ends with the processes of this start, because one of them runs it. A
        process that claims the rank of an ended one belongs to a later start.
    ends_are_noted : `note_end` is called for each rank. Until then, a rank that has sent DONE is
        waited for, since its process may run another script.
    when_complete : called once, when all ranks are connected and before any of them gets an answer.

    Attributes
    ----------
    port : where it listens, once it is open.
    statuses : the exit statuses that ranks have sent with DONE.
    lost : ranks whose connection ended without DONE, with an error text.
    was_used : whether a rank has ever connected.
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
        ends_are_noted: bool = False,
        when_complete: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(job=job, secret=secret, host=host, port=port, insecure=insecure)
        self.size = size
        self._one_start, self._when_complete = one_start, when_complete
        self._ends_are_noted = ends_are_noted
        self._noted: set[int] = set()  # ranks
        self._peers: dict[int, Peer] = {}
        self._exchange = Exchange(0, size, self._peers)
        self.statuses, self.lost = self._exchange.statuses, self._exchange.lost
        self.was_used = False

    def note_end(self, rank: int) -> None:
        """The process of a rank has ended normally. Any thread, while the store runs.

        Ranks that wait for it get an error.
        """
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._note_end, rank)

    def _note_end(self, rank: int) -> None:
        self._noted.add(rank)
        if rank not in self._peers and rank not in self.lost:
            status = self.statuses.get(rank)
            self._exchange.end(rank, status, f"rank {rank} has ended without calling init()")

    def _connections(self) -> int:
        return self.size

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
            raise Refusal(
                f"{hello.title()} claims the rank of {there.hello.title()}; start the ranks with "
                "one launcher, not with torchrun or mpirun inside a rank of another"
            )
        if hello.rank in self.lost:
            raise Refusal(
                f"{hello.title()} is too late: {self.lost[hello.rank]}", again=self._one_start
            )
        if self._one_start and hello.rank in self.statuses:
            raise Refusal(f"rank {hello.rank} of this job has ended", again=True)
        self._peers[hello.rank] = peer
        self.was_used = True
        self.statuses.pop(hello.rank, None)
        if len(self._peers) == self.size:
            complete, self._when_complete = self._when_complete, lambda: None
            complete()
        peer.send(protocol.encode({"welcome": True}))

    def _ended(self, peer: Peer) -> None:
        del self._peers[peer.hello.rank]
        who = f"{peer.hello.title()} closed its connection unexpectedly"
        over = not self._ends_are_noted or peer.hello.rank in self._noted
        self._exchange.end(peer.hello.rank, peer.done, who, may_return=not over)

    def _answer(self, peer: Peer, message: dict[str, Any]) -> None:
        what = protocol.take(message, "do", str)
        if what == "done":
            peer.done = protocol.take(message, "status", int)
            peer.send(protocol.encode({"done": True}))
        else:
            self._exchange.answer(peer.hello.rank, peer, what, message)
