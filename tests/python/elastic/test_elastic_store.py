"""The store of elastic jobs, with members in this process: their messages, and their losses.

Push tier, 4 s.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest

from hororing._job.rendezvous import protocol
from hororing._job.rendezvous.admission import NOTHING, Findings
from hororing._job.rendezvous.client import Deadline, Member, RendezvousError
from hororing._job.rendezvous.elastic_member import ElasticMember, RefusedError, RetiredError
from hororing._job.rendezvous.elastic_store import ElasticStore
from hororing._job.rendezvous.generations import Ended, Event, Lost, World

SECRET = bytes(range(32))
DEADLINE_S = 30.0
FRAME = struct.Struct("<Iiqqi132s")


@contextlib.contextmanager
def opened(**how: Any) -> Iterator[tuple[ElasticStore, list[Event]]]:
    events: list[Event] = []
    told = {"np": 2, "min_np": 1, "peer_timeout_s": DEADLINE_S, **how}
    store = ElasticStore(job="a job", secret=SECRET, on_event=events.append, **told)
    store.start_thread()
    try:
        yield store, events
    finally:
        store.stop()


def member(store: ElasticStore, **how: Any) -> ElasticMember:
    return ElasticMember(
        f"127.0.0.1:{store.port}", secret=SECRET, job="a job", timeout_s=DEADLINE_S, **how
    )


def worlds(*members: ElasticMember, failed: bool = False) -> list[World]:
    """Let all members leave their generation, each in a thread; return their next worlds."""
    with ThreadPoolExecutor(len(members)) as pool:
        waits = [pool.submit(each.next_world, 3, 0, failed) for each in members]
        return [each.result(DEADLINE_S) for each in waits]


def wait_for(events: list[Event], kind: type[Event]) -> Any:
    end = time.monotonic() + DEADLINE_S
    while not (found := [each for each in events if isinstance(each, kind)]):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found[0]


def frame(one: ElasticMember) -> tuple[Any, ...]:
    """Return the next frame of its second connection."""
    one.beats.settimeout(DEADLINE_S)
    data = b""
    while len(data) < FRAME.size:
        part = one.beats.recv(FRAME.size - len(data))
        assert part
        data += part
    return FRAME.unpack(data)


def test_all_members_are_told_of_the_same_world_and_share_texts_in_it():
    with opened() as (store, _):
        first, second = member(store), member(store)
        told = worlds(first, second)
        assert told[0] == told[1]
        assert (first.rank, first.size, first.generation) == (0, 2, 1)
        keys = [first.mesh_key]
        with ThreadPoolExecutor(2) as pool:
            assert (
                list(pool.map(lambda each: each.share(f"of {each.rank}"), (first, second)))
                == [["of 0", "of 1"]] * 2
            )
        worlds(first, second)
        assert first.generation == 2
        keys.append(first.mesh_key)
        assert keys[0] != keys[1]  # so connections of an older generation are refused
        first.done()
        second.done()


def test_what_waits_for_a_lost_member_fails_and_later_requests_too():
    with opened(np=3) as (store, events):
        members = [member(store) for _ in range(3)]
        worlds(*members)
        by_rank = sorted(members, key=lambda each: each.rank)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(by_rank[0].share, "x")
            by_rank[2].close()
            with pytest.raises(RendezvousError, match="is lost") as caught:
                waits.result(DEADLINE_S)
            assert caught.value.rank == 2
        with pytest.raises(RendezvousError, match="is lost"):
            by_rank[1].share("x")
        assert wait_for(events, Lost).rank == 2
        assert [len(each.members) for each in worlds(*by_rank[:2], failed=True)] == [2, 2]


def test_frames_tell_of_the_past_once_a_member_beats_and_then_of_the_present():
    with opened(np=2) as (store, _):
        first, second = member(store), member(store)
        worlds(first, second)
        store.hosts_updated(removed=["there"])
        first.beats.send(b"\1")
        kind, _, generation, stamp, what, _ = frame(first)
        assert (kind, generation, what) == (2, 1, 1)
        assert abs(stamp - time.time_ns() / 1000) < 60e6
        store.hosts_updated(added=["here"])
        kind, _, generation, later, what, _ = frame(first)
        assert (kind, generation, what) == (2, 1, 3)
        assert later > stamp
        rank = second.rank
        second.close()
        kind, blamed, generation, _, _, text = frame(first)
        assert (kind, blamed, generation) == (1, rank, 1)
        assert b"its connection closed unexpectedly\0" in text


def test_who_beats_lives_and_who_stops_is_lost_and_fenced():
    with opened(peer_timeout_s=1.0) as (store, events):
        lives, stops = member(store), member(store)
        worlds(lives, stops)
        stops.beats.send(b"\1")
        end = time.monotonic() + DEADLINE_S
        while not [each for each in events if isinstance(each, Lost)]:
            assert time.monotonic() < end
            lives.beats.send(b"\1")
            time.sleep(0.02)
        lost = wait_for(events, Lost)
        assert lost.uid == stops.uid
        assert "no sign of life" in lost.why
        with pytest.raises(RendezvousError):
            stops.next_world(0, marks=0, failed=False)
        assert not stops.connected
        lives.done()


def test_the_first_sign_of_life_may_take_longer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hororing._job.rendezvous.elastic_store._FIRST_BEAT", 100)
    with opened(np=1, peer_timeout_s=0.3) as (store, events):
        slow = member(store)
        time.sleep(0.6)
        worlds(slow)
        assert not [each for each in events if isinstance(each, Lost)]
        slow.beats.send(b"\1")
        assert wait_for(events, Lost).uid == slow.uid


def test_too_few_for_too_long_ends_the_job():
    with opened(np=2, min_np=2, elastic_timeout_s=2) as (store, events):
        first = member(store)
        with pytest.raises(RendezvousError, match="1 of at least 2 processes"):
            first.next_world(0, marks=0, failed=False)
        assert "1 of at least 2" in wait_for(events, Ended).reason
        with pytest.raises(RendezvousError, match="1 of at least 2") as caught:
            member(store)
        assert caught.value.refused


def test_an_interrupted_wait_can_be_repeated():
    with opened(np=2) as (store, _):
        first, second = member(store), member(store)
        first._send(  # like `next_world`, without waiting for the answer
            {
                "do": "ready",
                "ask": 0,
                "generation": 0,
                "step": 0,
                "marks": 0,
                "failed": False,
                **asdict(NOTHING),
                "misfits": [],
            },
            Deadline(DEADLINE_S),
        )
        assert worlds(second)[0].generation == 1
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(first.next_world, 5, 0, False)
            with pytest.raises(RendezvousError, match="has left"):
                second.share("x")  # the first one did not come to it
            assert worlds(second, failed=True)[0] == again.result(DEADLINE_S)


def test_who_is_not_needed_is_told_so():
    with opened(np=1, min_np=1, max_np=1) as (store, _):
        first = member(store)
        worlds(first)
        spare = member(store)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(spare.next_world, 0, 0, False)
            first.done()
            with pytest.raises(RetiredError):
                waits.result(DEADLINE_S)


def test_a_newcomer_with_other_settings_is_told_the_difference_and_nobody_else_anything():
    with opened(np=1, max_np=3) as (store, events):
        first = member(store)
        first.next_world(0, 0, False, Findings("HORORING_GPU=auto"))
        first.beats.send(b"\1")
        newcomer = member(store)
        with pytest.raises(RefusedError, match="GPU: off here, auto in the job"):
            newcomer.next_world(0, 0, False, Findings("HORORING_GPU=off"))
        assert wait_for(events, Lost).refused
        with pytest.raises(RefusedError):
            newcomer.next_world(0, 0, False, Findings("HORORING_GPU=auto"))
        newcomer.beats.send(b"\1")
        newcomer.done()
        newcomer.close()
        while newcomer.uid in store._peers:
            time.sleep(0.005)
        assert newcomer.uid not in store._last_beat
        first.beats.settimeout(0.05)
        with pytest.raises(TimeoutError):
            first.beats.recv(1)
        assert first.share("x") == ["x"]


def test_a_member_whose_state_differs_hears_so_when_it_asks_again():
    with opened(np=2, max_np=3) as (store, _):
        first, second = member(store), member(store)
        worlds(first, second)
        other = 1 - first.rank
        assert len(first.next_world(1, 0, False, Findings(misfits={other: "its w"})).members) == 1
        with pytest.raises(RefusedError, match="its w"):
            second.next_world(1, 0, True)
        second.close()
        assert first.share("x") == ["x"]


def test_a_rank_of_a_job_that_is_not_elastic_is_refused():
    with opened() as (store, _), pytest.raises(RendezvousError, match="this one is elastic"):
        Member(f"127.0.0.1:{store.port}", secret=SECRET, job="a job", rank=0, size=2)


def test_texts_of_frames_are_cut_between_characters():
    text = FRAME.unpack(protocol.over(1, 0, "\u20ac" * 100))[5].rstrip(b"\0")
    assert text.decode() == "\u20ac" * 43
