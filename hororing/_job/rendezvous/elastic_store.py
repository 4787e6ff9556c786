"""The server of an elastic job: its members, and the generations that they form.

A connection is a membership, as with `store.Store`, but the job survives a lost member.
`generations` decides what happens when; this module handles connections and time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from hororing._job.rendezvous import protocol
from hororing._job.rendezvous.admission import Findings
from hororing._job.rendezvous.exchange import Exchange
from hororing._job.rendezvous.generations import (
    Apart,
    Broken,
    Done,
    Ended,
    Event,
    Generations,
    Joined,
    Lost,
    Retired,
    Updated,
    World,
)
from hororing._job.rendezvous.protocol import ProtocolError
from hororing._job.rendezvous.server import Peer, Refusal, Server

__all__ = ["Apart", "Done", "ElasticStore", "Ended", "Event", "Joined", "Lost", "World"]

# The usual reason for a lost member. With other reasons, its process may still be running.
CONNECTION_ENDED = "its connection closed unexpectedly"


# Number of checks for signs of life within the time limit of a silent member.
_CHECKS = 8
# The first sign of life may take this many times longer.
_FIRST_BEAT = 10
# Two hosts that do not reach one another are tried again after this time in s; twice as long each
# time, until they have worked together for as long. A try costs the others about PEER_TIMEOUT_S.
_APART_S, _LONGEST_APART_S = 10.0, 3600.0


class ElasticStore(Server):
    """The server of one elastic job.

    Parameters
    ----------
    job, secret, host, port, insecure : as those of `Server`.
    np : the number of members that the first generation waits for.
    min_np, max_np : the minimum and maximum number of members of a generation; None: `np`.
    elastic_timeout_s : maximum time with fewer members, or until all members of a finished
        generation request the next one; 0: no limit.
    ends_are_noted : `note_end` is called for each member that has reported its end.
    peer_timeout_s : a member without a sign of life for this long is lost.
    on_event : called in the event loop of the store with each Joined, Lost, Done, World, Apart and
        Ended. Its exceptions are logged.
    """

    def __init__(
        self,
        *,
        job: str,
        secret: bytes,
        np: int,
        min_np: int | None = None,
        max_np: int | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        elastic_timeout_s: float = 600.0,
        peer_timeout_s: float = 5.0,
        ends_are_noted: bool = False,
        insecure: bool = False,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        super().__init__(job=job, secret=secret, host=host, port=port, insecure=insecure)
        self._on_event, self._np = on_event, np
        self._ends_are_noted = ends_are_noted
        self._elastic_timeout_s, self._peer_timeout_s = elastic_timeout_s, peer_timeout_s
        self._machine = Generations(
            np, np if min_np is None else min_np, np if max_np is None else max_np
        )
        self._peers: dict[str, Peer] = {}
        self._requests: dict[str, int] = {}  # the numbers of requests for a generation, by uid
        self._ranks: dict[int, Peer] = {}  # of the current generation
        self._exchange = Exchange(0, 0, self._ranks)
        self._refused: dict[str, str] = {}  # the reasons, by uid, while these are connected
        self._apart_s: dict[frozenset[str], float] = {}  # for how long, by pair
        self._together: dict[frozenset[str], float] = {}  # since when again, by pair
        self._heals: set[asyncio.TimerHandle] = set()
        # By uid: the connections on which members send heartbeats, and the time of the last one.
        self._beats: dict[str, Peer] = {}
        self._last_beat: dict[str, float] = {}
        self._beating: set[str] = set()  # members that have sent one, and so read frames
        self._checked_at = 0.0
        self._check_timer: asyncio.TimerHandle | None = None
        self._over, self._updated = b"", b""  # the last frames of these kinds
        self._stamp, self._updates = 0, 0
        self._limit: asyncio.TimerHandle | None = None

    # -----------------------------------------------------------------------------------------
    # Called by the launcher, on any thread, while the store runs

    def expect(self, count: int) -> None:
        """Set the number of started processes that have not connected yet.

        The first generation waits for `np` members, or until no more are expected; later ones never
        wait for processes that have not connected. Each connection counts one down.
        """
        self._apply(lambda: self._machine.expect(count))

    def hosts_updated(self, added: Iterable[str] = (), removed: Iterable[str] = ()) -> None:
        """Inform members of added and removed hosts, so that they leave together."""
        new, gone = list(added), list(removed)
        self._apply(lambda: self._machine.hosts_updated(new, gone))

    def retire(self, host_or_uid: str) -> None:
        """Exclude processes of this host, or the one with this uid, from further generations.

        They stay in the current one until all leave it; their `init` then ends the process.
        """
        self._apply(lambda: self._machine.retire(host_or_uid))

    def note_end(self, uid: str, code: int) -> None:
        """The process of this uid, which has reported its end, has ended with this exit code."""
        self._apply(lambda: self._machine.note_end(uid, code))

    def _apply(self, what: Callable[[], list[Event]]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(lambda: self._apply_events(what()))

    # -----------------------------------------------------------------------------------------
    # Messages of members

    def _connections(self) -> int:
        return 2 * self._np

    def _members(self) -> list[Peer]:
        return [*self._peers.values(), *self._beats.values()]

    def _enter(self, peer: Peer) -> None:
        hello = peer.hello
        if hello.beats:
            if hello.uid not in self._peers or hello.uid in self._beats:
                raise Refusal(f"{hello.title()} is not a member")
            self._beats[hello.uid] = peer
            peer.send(protocol.encode({"welcome": True}))
            return
        if not hello.uid:
            raise Refusal(
                f"{hello.title()} belongs to a job of {hello.size} ranks, and this one is elastic"
            )
        if self._machine.ended:
            raise Refusal(self._machine.ended)
        if hello.uid in self._peers:
            raise Refusal(f"{hello.title()} has a uid that is in use")
        self._peers[hello.uid] = peer
        # An interpreter on a busy machine may need a while for its second connection.
        first = asyncio.get_running_loop().time() + _FIRST_BEAT * self._peer_timeout_s
        self._last_beat[hello.uid] = first
        peer.send(protocol.encode({"welcome": True}))
        self._apply_events(self._machine.join(hello.uid, hello.host, hello.pid))

    async def _serve_member(self, peer: Peer) -> None:
        if not peer.hello.beats:
            return await super()._serve_member(peer)
        uid = peer.hello.uid
        while await peer.reader.read(protocol.FIRST_BYTES) and self._beats.get(uid) is peer:
            if uid in self._refused:
                continue
            if uid not in self._beating:
                self._beating.add(uid)
                peer.send(self._over + self._updated)
            self._last_beat[uid] = asyncio.get_running_loop().time()
        return None

    def _answer(self, peer: Peer, message: dict[str, Any]) -> None:
        uid = peer.hello.uid
        if self._peers.get(uid) is not peer:
            raise ProtocolError("a request of a process that was declared lost")
        what = protocol.take(message, "do", str)
        if what == "ready":
            self._requests[uid] = protocol.take(message, "ask", int)
            if uid in self._refused:
                self._reply(uid, {"refused": self._refused[uid]})
                return
            if self._machine.ended:
                self._reply(uid, {"error": self._machine.ended})
                return
            self._apply_events(
                self._machine.ready(
                    uid,
                    protocol.take(message, "generation", int),
                    protocol.take(message, "step", int),
                    protocol.take(message, "marks", int),
                    protocol.take(message, "failed", bool),
                    _findings(message),
                )
            )
        elif what == "done":
            peer.done = protocol.take(message, "status", int)
            peer.send(protocol.encode({"done": True}))
        else:
            rank = self._machine.rank(uid)
            if rank < 0:
                raise ProtocolError("a request of a process without a rank")
            self._exchange.answer(rank, peer, what, message)

    def _ended(self, peer: Peer) -> None:
        uid = peer.hello.uid
        if self._refused.get(uid) is not None:
            if self._peers.get(uid) is peer:
                del self._refused[uid]
                self._close(uid)
            return
        member = self._peers.get(uid)
        if member is None or (member is not peer and member.done is not None):
            return  # it was declared lost before, or is about to end normally
        if peer.done is None:
            self._apply_events(self._machine.lost(uid, CONNECTION_ENDED))
            return
        self._forget(uid, peer.done)
        self._apply_events(self._machine.done(uid, peer.done, sure=not self._ends_are_noted))

    def _forget(self, uid: str, status: int | None, why: str = "") -> None:
        """Close its connections, and end waits for it. `status`: None if it is lost."""
        self._drop(uid, status, why)
        self._close(uid, abort=status is None)

    def _refuse(self, event: Lost) -> None:
        """Leave its connections open: its next request, if it has not made one, tells it why."""
        self._refused[event.uid] = event.why
        self._reply(event.uid, {"refused": event.why})
        self._drop(event.uid, None, event.why)

    def _close(self, uid: str, abort: bool = False) -> None:
        for connection in [each.pop(uid) for each in (self._peers, self._beats) if uid in each]:
            if abort:
                connection.writer.transport.abort()
            else:
                connection.writer.close()

    def _drop(self, uid: str, status: int | None, why: str) -> None:
        """It is no member any more: end waits for it."""
        peer = self._peers[uid]
        self._requests.pop(uid, None)
        self._last_beat.pop(uid, None)
        self._beating.discard(uid)
        for rank in [each for each, there in self._ranks.items() if there is peer]:
            del self._ranks[rank]
            self._exchange.end(rank, status, f"{peer.hello.title()} is lost: {why}")

    # -----------------------------------------------------------------------------------------
    # Consequences of events

    def _apply_events(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, World):
                self._formed(event)
            elif isinstance(event, Broken):
                self._break(event)
            elif isinstance(event, Updated):
                self._update(event)
            elif isinstance(event, Retired):
                self._reply(event.uid, {"retired": True})
            elif isinstance(event, Lost) and event.refused:
                self._refuse(event)
            elif isinstance(event, Lost):
                self._forget(event.uid, None, event.why)
            elif isinstance(event, Apart):
                self._heal_later(event)
            elif isinstance(event, Ended):
                for uid in list(self._requests):
                    self._reply(uid, {"error": event.reason})
            if isinstance(event, (Joined, Lost, Done, World, Apart, Ended)):
                self._report(event)
        self._watch_limit()

    def _report(self, event: Event) -> None:
        try:
            self._on_event(event)
        except Exception:
            logging.getLogger("hororing").exception("on_event of the elastic store has failed")

    def _formed(self, world: World) -> None:
        self._updates = 0
        self._ranks = {rank: self._peers[member.uid] for rank, member in enumerate(world.members)}
        self._exchange = Exchange(world.generation, len(world.members), self._ranks)
        members = [[each.uid, each.host, each.pid, each.step, each.marks] for each in world.members]
        for places in self._apart_s:
            if places <= {place for each in world.members for place in (each.host, each.uid)}:
                self._together.setdefault(places, asyncio.get_running_loop().time())
        for member in world.members:
            self._reply(member.uid, {"generation": world.generation, "members": members})

    def _break(self, event: Broken) -> None:
        peer = self._ranks.get(event.rank)
        if peer is not None:  # it has left by itself
            self._exchange.end(event.rank, None, event.why)
        self._over = protocol.over(event.generation, event.rank, event.why)
        self._push(self._over)

    def _update(self, event: Updated) -> None:
        self._stamp = max(self._stamp + 1, time.time_ns() // 1000)
        self._updates |= event.what
        self._updated = protocol.updated(event.generation, self._stamp, self._updates)
        self._push(self._updated)

    def _heal_later(self, event: Apart) -> None:
        loop, places = asyncio.get_running_loop(), event.places
        last_s = self._apart_s.get(places, 0.0)
        if loop.time() - self._together.pop(places, loop.time()) > last_s:
            last_s = 0.0
        self._apart_s[places] = min(max(2 * last_s, _APART_S), _LONGEST_APART_S)

        def heal() -> None:
            self._heals.discard(timer)
            self._apply_events(self._machine.heal(places))

        timer = loop.call_later(self._apart_s[places], heal)
        self._heals.add(timer)

    def _push(self, frame: bytes) -> None:
        for uid in self._beating:
            self._beats[uid].send(frame)

    def _reply(self, uid: str, what: dict[str, Any]) -> None:
        ask = self._requests.pop(uid, None)
        if ask is not None:
            self._peers[uid].send(protocol.encode({"ask": ask, **what}))

    # -----------------------------------------------------------------------------------------
    # Time

    async def open(self) -> None:
        """Admit members from now on, and check that they are alive."""
        await super().open()
        self._checked_at = asyncio.get_running_loop().time()
        self._check_members()

    async def close(self) -> None:
        """Close every connection, and stop listening."""
        for timer in (self._check_timer, self._limit, *self._heals):
            if timer is not None:
                timer.cancel()
        await super().close()

    def _check_members(self) -> None:
        loop = asyncio.get_running_loop()
        now, pause_s = loop.time(), self._peer_timeout_s / _CHECKS
        if now - self._checked_at > 2 * pause_s:
            # This process was stopped or got no processor time, so it has received no sign of life.
            self._last_beat = {uid: max(at, now) for uid, at in self._last_beat.items()}
        self._checked_at = now
        for uid in [
            each for each, at in self._last_beat.items() if now - at > self._peer_timeout_s
        ]:
            if uid in self._last_beat:
                silent_s = now - self._last_beat[uid]
                why = f"gave no sign of life for {silent_s:.1f} s"
                self._apply_events(self._machine.lost(uid, why))
        self._check_timer = loop.call_later(pause_s, self._check_members)

    def _watch_limit(self) -> None:
        lacks = bool(self._machine.lacks()) and self._elastic_timeout_s > 0
        if not lacks and self._limit is not None:
            self._limit.cancel()
            self._limit = None
        elif lacks and self._limit is None:
            loop = asyncio.get_running_loop()
            self._limit = loop.call_later(self._elastic_timeout_s, self._give_up)

    def _give_up(self) -> None:
        self._limit = None
        self._apply_events(self._machine.give_up())


def _findings(message: dict[str, Any]) -> Findings:
    ranks = protocol.take(message, "unreachable", list)
    misfits = protocol.take(message, "misfits", list)
    if not all(type(rank) is int for rank in [*ranks, *(each[0] for each in misfits)]):
        raise ProtocolError("a rank that is no number")
    return Findings(
        protocol.take(message, "settings", str),
        protocol.take(message, "began", bool),
        protocol.take(message, "why", str),
        tuple(ranks),
        {rank: str(why) for rank, why in misfits},
        protocol.take(message, "lost", int),
    )
