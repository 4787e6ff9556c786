"""Generations: random histories of a small job, without IO. Push tier, 3 s."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hororing._job.rendezvous.admission import Findings
from hororing._job.rendezvous.generations import (
    ADDED,
    REMOVED,
    Apart,
    Broken,
    Ended,
    Event,
    Generations,
    Joined,
    Lost,
    Retired,
    Updated,
    World,
)


def came(job: Generations, *uids: str, host: str = "a") -> list[Event]:
    """Let each member join and report ready; return the events."""
    events: list[Event] = []
    for uid in uids:
        events += job.join(uid, host, 1)
        events += job.ready(uid, 0, 0, False, False)
    return events


def uids(events: list[Event]) -> list[str]:
    """Return the members of the only world that has formed."""
    (world,) = [event for event in events if isinstance(event, World)]
    return [each.uid for each in world.members]


def again(job: Generations, uid: str, step: int = 0, **how: bool) -> list[Event]:
    return job.ready(uid, job.number, step, how.get("marks", 0), how.get("failed", False))


def test_the_first_generation_waits_for_all_that_were_asked_for():
    job = Generations(3, 2, 4)
    assert not [each for each in came(job, "x", "y") if isinstance(each, World)]
    assert uids(came(job, "z")) == ["x", "y", "z"]
    assert job.number == 1


def test_the_first_generation_is_smaller_where_nobody_else_will_come():
    job = Generations(3, 2, 3)
    job.expect(3)
    assert not [each for each in came(job, "x", "y") if isinstance(each, World)]
    assert uids(job.expect(0)) == ["x", "y"]


def test_nobody_is_left_behind_between_joining_and_being_ready():
    job = Generations(2, 1, 2)
    job.expect(2)
    came(job, "x")
    assert job.join("y", "a", 1) == [Joined("y", "a", 1)]
    assert uids(job.ready("y", 0, 0, False, False)) == ["x", "y"]


def test_survivors_go_on_without_waiting_for_newcomers():
    job = Generations(3, 2, 3)
    came(job, "x", "y", "z")
    lost, broken = job.lost("y", "killed")
    assert isinstance(lost, Lost)
    assert lost.rank == 1
    assert broken == Broken(1, 1, "rank 1 (host a, pid 1) is lost: killed")
    job.join("new", "a", 1)
    assert again(job, "x", failed=True) == []
    assert uids(again(job, "z", failed=True)) == ["x", "z"]
    assert job.ready("new", 0, 0, False, False) == [Updated(2, ADDED)]


@pytest.mark.parametrize("how", ["killed", "failed", "removed"])
def test_newcomers_alone_would_start_from_the_beginning(how: str):
    job = Generations(2, 1, 2)
    came(job, "x", "y")
    job.lost("y", "killed")
    assert uids(again(job, "x", failed=True)) == ["x"]
    came(job, "new", host="b")
    if how == "killed":
        events = job.lost("x", "killed")
    elif how == "failed":
        events = job.done("x", 1)
    else:
        job.retire("a")
        events = again(job, "x", failed=False)
    events += came(job, "late", host="b")
    assert World not in map(type, events)
    assert job.lacks() == "no process that has the state of the training"
    assert [type(each) for each in job.give_up()] == [Ended]


def test_too_few_wait_for_newcomers_and_not_for_ever():
    job = Generations(2, 2, 2)
    came(job, "x", "y")
    assert job.lacks() == ""
    job.lost("x", "killed")
    again(job, "y", failed=True)
    assert job.lacks() == "1 of at least 2 processes"
    assert uids(came(job, "new")) == ["y", "new"]
    assert job.lacks() == ""
    job.lost("new", "killed")
    again(job, "y", failed=True)
    assert [type(each) for each in job.give_up()] == [Ended]
    assert came(job, "late")[1:] == []


def test_rank_0_is_the_most_advanced_and_hosts_stay_together():
    job = Generations(4, 1, 4)
    for uid, host in (("x", "a"), ("y", "b"), ("z", "a"), ("w", "b")):
        came(job, uid, host=host)
    assert [each.host for each in job.world.members] == ["a", "a", "b", "b"]
    again(job, "x", step=6)
    again(job, "y", step=7)
    again(job, "z", step=7, marks=1)
    assert uids(again(job, "w", step=7, marks=1)) == ["z", "x", "w", "y"]


def test_a_death_while_a_generation_forms_costs_nothing_else():
    job = Generations(3, 1, 3)
    came(job, "x", "y", "z")
    job.lost("x", "killed")
    again(job, "y", failed=True)
    assert uids(job.lost("z", "killed")) == ["y"]
    assert job.number == 2


def test_who_never_got_into_a_generation_ends_it():
    job = Generations(2, 1, 2)
    came(job, "x", "y")
    (broken,) = job.ready("y", 0, 0, False, False)
    assert isinstance(broken, Broken)
    assert uids(again(job, "x", failed=True)) == ["x", "y"]


def test_more_than_max_np_wait_and_take_over():
    job = Generations(2, 2, 2)
    came(job, "x", "y")
    assert came(job, "spare") == [Joined("spare", "a", 1)]
    job.lost("x", "killed")
    assert uids(again(job, "y", step=3, failed=True)) == ["y", "spare"]


def test_members_leave_in_agreement_for_newcomers_and_nobody_is_broken_off():
    job = Generations(2, 1, 3)
    came(job, "x", "y")
    assert came(job, "new")[1:] == [Updated(1, ADDED)]
    assert again(job, "x", step=5) == []
    assert uids(again(job, "y", step=5)) == ["x", "y", "new"]


def test_processes_of_a_host_that_is_gone_end_when_they_ask():
    job = Generations(2, 1, 2)
    came(job, "x")
    came(job, "y", host="b")
    assert job.hosts_updated([], ["b"]) == [Updated(1, REMOVED)]
    assert job.retire("b") == []
    assert again(job, "y") == [Retired("y")]
    assert uids(again(job, "x")) == ["x"]
    job.done("y", 0)
    job.hosts_updated(["b"], [])
    assert job.join("again", "b", 1)
    assert job.ready("again", 0, 0, False, False) == [Updated(2, ADDED)]
    assert job.retire("again") == [Retired("again")]  # the process alone


def test_once_a_member_has_done_its_work_the_rest_may_end_in_any_number():
    job = Generations(3, 3, 3)
    came(job, "x", "y", "z")
    assert came(job, "spare") == [Joined("spare", "a", 1)]
    assert job.done("x", 0)[1:] == [Retired("spare")]
    job.lost("y", "killed")
    assert uids(again(job, "z", failed=True)) == ["z"]


def test_a_member_that_does_not_come_is_taken_for_dead_at_last():
    job = Generations(2, 1, 2)
    came(job, "x", "y")
    again(job, "x")
    assert job.lacks() == "rank 1 (host a, pid 1) is not ready"
    events = job.give_up()
    assert isinstance(events[0], Lost)
    assert uids(events) == ["x"]


@pytest.mark.parametrize("wrong", [(0, 0, 1), (2, 3, 3), (3, 1, 2)])
def test_numbers_of_processes_ascend(wrong: tuple[int, int, int]):
    with pytest.raises(ValueError, match="must ascend"):
        Generations(*wrong)


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_has_finished_once_its_exit_code_says_so(code: int):
    job = Generations(2, 2, 2)
    came(job, "x", "y")
    job.done("y", 0, sure=False)
    assert again(job, "x") == []
    events = job.note_end("y", code)
    if code == 0:
        assert uids(events) == ["x"]
    else:
        assert uids(came(job, "new")) == ["x", "new"]


# ---------------------------------------------------------------------------------------------
# Processes that cannot take part


def settings_of(**values: object) -> Findings:
    return Findings("\n".join(f"{name}={value}" for name, value in values.items()))


def test_a_newcomer_with_other_settings_is_refused_and_nobody_else_leaves():
    job = Generations(2, 1, 4)
    for uid in "xy":
        job.join(uid, "a", 1)
        job.ready(uid, 0, 0, 0, False, settings_of(version=1, FUSION=64))
    job.join("new", "b", 1)
    (refused,) = job.ready("new", 0, 0, 0, False, settings_of(version=2, FUSION=64))
    assert isinstance(refused, Lost)
    assert refused.refused
    assert "version: 2 here, 1 in the job" in refused.why
    assert "FUSION" not in refused.why
    job.join("other", "b", 1)
    found = settings_of(version=1, FUSION=64)
    assert job.ready("other", 0, 0, 0, False, found) == [Updated(1, ADDED)]


def test_processes_that_differ_from_the_start_form_a_generation_which_then_fails():
    job = Generations(2, 1, 4)
    for uid, fusion in (("x", 1), ("y", 2)):
        job.join(uid, "a", 1)
        events = job.ready(uid, 0, 0, 0, False, settings_of(FUSION=fusion))
    assert uids(events) == ["x", "y"]


def test_a_member_whose_state_differs_is_refused_and_the_others_go_on():
    job = Generations(3, 1, 4)
    came(job, "x", "y", "z")
    (refused,) = job.ready("x", 1, 5, 0, False, Findings(misfits={2: "its model differs"}))
    assert refused == Lost("z", "a", 1, 2, "its model differs", refused=True)
    assert uids(again(job, "y", 5)) == ["x", "y"]


def apart(job: Generations, uid: str, *ranks: int, began: bool = True) -> list[Event]:
    found = Findings(began=began, unreachable=ranks)
    return job.ready(uid, job.number, 0, 0, True, found)


def test_of_two_hosts_that_do_not_reach_one_another_the_newcomer_waits():
    job = Generations(2, 1, 3)
    came(job, "x", host="a")
    came(job, "y", host="b")
    came(job, "new", host="c")
    for uid in "xy":
        events = again(job, uid)
    assert uids(events) == ["x", "y", "new"]
    broken, told = apart(job, "y", 2, began=False)
    assert broken.why == "rank 1 (host b, pid 1) cannot reach rank 2 (host c, pid 1)"
    why = f"{broken.why}; one of the two hosts is left out for a while"
    assert told == Apart(frozenset("bc"), why)
    again(job, "x", failed=True)
    assert uids(again(job, "new", failed=True)) == ["x", "y"]
    assert came(job, "next", host="c")[1:] == []  # it would not get further
    assert job.heal(frozenset("bc")) == [Updated(4 - 1, ADDED)]


@pytest.mark.parametrize("first", ["lost", "told"])
def test_a_host_that_is_lost_is_not_left_out_when_it_returns(first: str):
    job = Generations(2, 1, 2)
    came(job, "x", host="a")
    came(job, "y", host="b")
    if first == "lost":
        job.lost("y", "its connection closed")
    events = apart(job, "x", 1)
    if first == "told":
        events = job.lost("y", "its connection closed")
    assert uids(events) == ["x"]
    assert Updated(2, ADDED) in came(job, "new", host="b")


def test_the_host_with_most_broken_pairs_is_left_out_while_enough_remain():
    job = Generations(4, 3, 4)
    for uid in "abcd":
        came(job, uid, host=uid)
    apart(job, "b", 0)
    apart(job, "c", 0)
    again(job, "a", failed=True)
    assert uids(again(job, "d", failed=True)) == ["b", "c", "d"]
    apart(job, "b", 1)
    assert uids_or_none(again(job, "c", failed=True)) is None
    assert uids_or_none(again(job, "d", failed=True)) is None
    assert job.lacks() == (
        "2 of at least 3 processes, because there are hosts that do not reach one another"
    )
    assert uids_or_none(job.heal(frozenset("bc"))) == ["b", "c", "d"]


def uids_or_none(events: list[Event]) -> list[str] | None:
    return uids(events) if any(isinstance(each, World) for each in events) else None


def test_the_job_ends_if_the_same_processes_fail_to_start_three_times_in_a_row():
    job = Generations(2, 1, 2)
    events = came(job, "x", "y")
    for _ in range(3):
        assert isinstance(events[-1], World)
        job.ready("x", job.number, 0, 0, True, Findings(began=False, why="no shared memory"))
        events = again(job, "y", failed=True)
    assert isinstance(events[-1], Ended)
    assert "no shared memory" in events[-1].reason


class AnyHistory(RuleBasedStateMachine):
    """Up to 6 processes on 2 hosts, with any order of events that members and time can cause."""

    def __init__(self) -> None:
        super().__init__()
        self.job = Generations(3, 2, 4)
        self.count = 0
        self.inside: dict[str, int] = {}  # the generation that each member has entered and not left
        self.waiting: set[str] = set()
        self.silent: set[str] = set()  # joined, not ready
        self.worlds: list[World] = []

    def note(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, World):
                self.worlds.append(event)
                for each in event.members:
                    assert each.uid in self.waiting, "a member that has not left"
                    self.waiting.discard(each.uid)
                    self.inside[each.uid] = event.generation
                assert 2 <= len(event.members) <= 4
            elif isinstance(event, Broken):
                assert event.generation == self.worlds[-1].generation
            elif isinstance(event, Lost):
                self.drop(event.uid)

    def drop(self, uid: str) -> None:
        self.inside.pop(uid, None)
        self.waiting.discard(uid)
        self.silent.discard(uid)

    def there(self) -> list[str]:
        return sorted({*self.inside, *self.waiting, *self.silent})

    @precondition(lambda self: len(self.there()) < 6)
    @rule(host=st.sampled_from("ab"))
    def joins(self, host: str) -> None:
        uid = f"p{self.count}"
        self.count += 1
        self.silent.add(uid)
        self.note(self.job.join(uid, host, self.count))

    @precondition(lambda self: self.silent or self.inside)
    @rule(data=st.data(), step=st.integers(0, 3), marks=st.integers(0, 2), failed=st.booleans())
    def leaves(self, data: st.DataObject, step: int, marks: int, failed: bool) -> None:
        uid = data.draw(st.sampled_from(sorted({*self.silent, *self.inside})))
        last = self.inside.pop(uid, 0)
        self.silent.discard(uid)
        self.waiting.add(uid)
        self.note(self.job.ready(uid, last, step, marks, failed))

    @precondition(lambda self: self.there())
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        self.note(self.job.lost(data.draw(st.sampled_from(self.there())), "killed"))

    @precondition(lambda self: self.job.lacks())
    @rule()
    def time_passes(self) -> None:
        self.note(self.job.give_up())

    @invariant()
    def generations_ascend(self) -> None:
        numbers = [each.generation for each in self.worlds]
        assert all(b == a + 1 for a, b in pairwise(numbers))

    @invariant()
    def ranks_are_in_order(self) -> None:
        if self.worlds:
            members = self.worlds[-1].members
            best = max((each.step, each.marks) for each in members)
            assert (members[0].step, members[0].marks) == best
            hosts = [each.host for each in members]
            assert len([1 for a, b in pairwise(hosts) if a != b]) < len(set(hosts))

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        """A waiting member can go on, waits for a working member, or has a time limit."""
        if self.waiting and not self.job.ended and not self.inside:
            enough = len(self.waiting) >= (2 if self.worlds else 3)
            if self.worlds:
                enough &= any(
                    each.uid in self.waiting for world in self.worlds for each in world.members
                )
            assert not enough or (not self.worlds and self.silent)
            assert self.job.lacks() or self.job.ended


AnyHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=40, derandomize=True)
TestAnyHistory = AnyHistory.TestCase
