"""What an elastic job tells its user: one line for each event."""

from __future__ import annotations

import signal
import time

import pytest

from hororing._job.rendezvous.generations import Member, World
from hororing.hororun.flags.host_lists import Host
from hororing.hororun.host.local import STDERR
from hororing.hororun.host.output import Output
from hororing.hororun.job.elastic_processes import ElasticProcess
from hororing.hororun.job.job import JobHost
from hororing.hororun.job.news import News
from hororing.hororun.job.slots import Slot


class Told:
    """The lines of the launcher, without their clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "strftime", lambda form: "CLOCK")
        self.text = b""
        self.news = News(Output({STDERR: self}, 3, tag=True, elastic=True), several=False)  # type: ignore[dict-item]

    def write(self, data: memoryview) -> int:
        self.text += bytes(data)
        return len(data)

    def lines(self) -> list[str]:
        lines, self.text = self.text.decode().splitlines(), b""
        assert all(line.startswith("hororun: CLOCK ") for line in lines)
        return [line.removeprefix("hororun: CLOCK ") for line in lines]


def process(number: int, rank: int) -> ElasticProcess:
    host = JobHost(None, 0.0)  # type: ignore[arg-type]
    return ElasticProcess(number, Slot("localhost", number, 3), host, 0.0, rank=rank, generation=1)


def world(generation: int, ranks: int, lost: int = -1, why: str = "") -> World:
    members = tuple(Member(f"u{n}", "localhost", 10 + n, 7, 0) for n in range(ranks))
    return World(generation, members, why, lost)


def test_a_death_is_one_line_with_its_cause_first_and_what_it_cost(monkeypatch: pytest.MonkeyPatch):
    told = Told(monkeypatch)
    dead = process(2, rank=1)
    told.news.add(dead, stops=True)
    told.now += 0.03
    told.news.form(world(4, 3, lost=0))
    told.news.say_after("process 3 starts in place of process 2")
    told.news.tell_due(False)
    assert told.lines() == []  # its exit code is about to come
    dead.code, dead.then = -signal.SIGKILL, "; its slot pauses for 0.5 s"
    told.news.tell_due(False)
    assert told.lines() == [
        "process 2 (rank 1) was killed by SIGKILL; its slot pauses for 0.5 s; generation 4 with 3 "
        "ranks trains on after 0.03 s, 0 steps lost",
        "process 3 starts in place of process 2",
    ]
    told.news.add("process 3 has arrived")
    told.news.form(world(5, 4, lost=1))
    told.news.tell_due(False)
    wanted = "process 3 has arrived; generation 5 with 4 ranks trains on, 1 step lost"
    assert told.lines() == [wanted]


def test_what_happens_is_told_even_if_no_generation_follows(monkeypatch: pytest.MonkeyPatch):
    told = Told(monkeypatch)
    frozen = process(1, rank=0)
    frozen.code, frozen.end = -signal.SIGKILL, "gave no sign of life for 5.0 s"
    told.news.add(frozen, stops=True)
    told.news.tell_due(False)
    assert told.lines() == []
    told.now += 1.1
    told.news.tell_due(False)
    assert told.lines() == ["process 1 (rank 0) gave no sign of life for 5.0 s"]
    told.now += 9
    told.news.form(world(2, 1))
    told.news.tell_due(False)
    assert told.lines() == ["generation 2 with 1 rank trains on after 10.10 s, from commit 7"]


def test_no_generation_lacks_a_cause(monkeypatch: pytest.MonkeyPatch):
    told = Told(monkeypatch)
    done = process(0, rank=0)
    done.status = done.code = 0
    told.news.add(done, stops=True, quiet=True)
    assert told.news.form(world(2, 2, lost=0)) == "process 0 (rank 0) has finished"
    told.news.tell_due(False)
    assert told.lines()[0].startswith("process 0 (rank 0) has finished; generation 2 ")
    why = "rank 1 (host a, pid 5) has left generation 2: no route to host"
    told.news.form(world(3, 2, why=why))
    told.news.tell_due(False)
    assert told.lines()[0].startswith(f"{why}; generation 3 with 2 ranks trains on")


def test_changes_of_slots_are_announced(monkeypatch: pytest.MonkeyPatch):
    told = Told(monkeypatch)
    told.news.say_changes({"a": 3, "b": 1}, [Host("a", 4), Host("b", 1), Host("c", 2)])
    assert told.lines() == ["host a has 4 slots now, and had 3"]
