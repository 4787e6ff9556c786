"""The results of the conformance suite, with every algorithm, on every layout of the ranks.

Algorithms do not depend on the adapter, so NumPy's plays them all. Every case also checks which
algorithms its allreduces have used, because the core replaces an algorithm that is not possible.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import mpirun
import pretend_hosts
import pytest
import schedules
import tiers
import weighted_oracle
from conformance import results
from conformance.players import player_of

import hororing.numpy as hvd

CALLS = 120  # in the random schedule
PART = 4  # divides large tensors, which take half of the time; each still has several blocks
FLAT = {"ring", "rank_order"}  # rank_order if small, or if a ring would round twice
PREFIX = "allreduces_"


@dataclasses.dataclass(frozen=True)
class Way:
    """A job: its settings, and the algorithms that it uses."""

    hosts: str  # of each rank
    knobs: str  # NAME=VALUE, without HORORING_
    taken: frozenset[str]  # exactly these in the world

    @property
    def size(self) -> int:
        return len(self.hosts)

    def __str__(self) -> str:
        return f"{self.hosts}-{self.knobs.replace(' ', '-')}"


def ways(knobs: str, taken: set[str], *hosts: str) -> list[Way]:
    return [Way(each, knobs, frozenset(taken)) for each in hosts]


PUSHED = (
    "aab-BACKEND=auto", "abab-BACKEND=auto", "aba-BACKEND=host", "aaa-BACKEND=host",
    "aab-REPRODUCIBLE", "aaaa-REPRODUCIBLE", "aaaa-TRANSPORT",
)  # fmt: skip
WAYS = [
    *ways("BACKEND=auto", {"three_phase"}, "aab", "aabb", "aaab", "abab"),
    *ways("BACKEND=auto", FLAT, "ab", "abcd"),
    *ways("REPRODUCIBLE=1", {"rank_order"}, "ab", "aab", "aabb"),
    *ways("REPRODUCIBLE=1 TRANSPORT=shm", {"shm_direct", "at_once"}, "aaaa"),
    *ways("BACKEND=host", FLAT, "aaa", "aaaa", "aba", "aabb"),
    *ways("SPIN_US=0", {"shm_direct"}, "aaa"),
    *ways("TRANSPORT=mpi", FLAT, "aa", "aaaa"),
    *ways("TRANSPORT=mpi BACKEND=host", FLAT, "aba"),
    *ways("TRANSPORT=mpi BACKEND=auto", {"three_phase"}, "aab", "abab"),
]
# For each, an uneven layout, or one whose ranks alternate; and four ranks of one host.
PUSH = [way for way in WAYS if str(way).startswith(PUSHED)]

# ---------------------------------------------------------------------------------------------
# On the ranks

# The algorithm of a process set depends on its own ranks, and may differ from the world's.
WEIGHTED = "case_weighted_averages"
OF_SETS = {"case_every_verb_in_every_process_set"}
_taken: set[str] = set()


def begin() -> None:
    hvd.init()


def counted() -> dict[str, int]:
    told = hvd.statistics()
    return {name[len(PREFIX) :]: told[name] for name in told if name.startswith(PREFIX)}


def play(case: str) -> None:
    wished = set(os.environ["TEST_TAKEN"].split())
    before = counted()
    if case == WEIGHTED:
        weighted_oracle.check_numpy((1, 5000, 40_000))
    elif case == "case_tensors_of_several_blocks":
        results.several_blocks(player_of("numpy"), PART)
    else:
        getattr(results, case)(player_of("numpy"))
    taken = {way for way, count in counted().items() if count > before[way]}
    if case in OF_SETS:
        return
    assert not wished or taken <= wished, f"{case}: by {taken}, not {wished}"
    _taken.update(taken)


def everything_was_taken() -> None:
    wished = set(os.environ["TEST_TAKEN"].split())
    # Ranks meet only within microseconds. test_one_shot_allreduce.py checks that they do.
    assert _taken >= wished - {"at_once"}, f"only {_taken} of {wished}"
    assert _taken
    hvd.shutdown()


def random_calls() -> None:
    schedules.play(player_of("numpy"), mpirun.seed(), CALLS, len(os.environ["TEST_HOSTS"]))


CASES: dict[str, Any] = {
    "case_begin": begin,
    **{
        case: functools.partial(play, case)
        for case in (*mpirun.case_names(vars(results)), WEIGHTED)
    },
    "case_everything_was_taken": everything_was_taken,
    "case_random_calls": random_calls,
}
if __name__ == "cases":  # for mpirun.py
    globals().update(CASES)

# ---------------------------------------------------------------------------------------------
# The tests


@pytest.mark.timeout(250)
@pytest.mark.parametrize("way", tiers.choose(WAYS, PUSH), ids=str)
def test_every_case(way: Way) -> None:
    names = ",".join(way.hosts) if len(set(way.hosts)) > 1 else ""
    if names and pretend_hosts.why_not():
        pytest.skip(pretend_hosts.why_not())
    knobs = dict(knob.split("=") for knob in way.knobs.split())
    job = mpirun.run(
        __file__, way.size, script=False, timeout_s=240, names=names,
        environment={
            "TEST_HOSTS": way.hosts,
            "TEST_TAKEN": " ".join(sorted(way.taken)),
            "HORORING_DYNAMIC_PROCESS_SETS": "1",
            **{f"HORORING_{name}": value for name, value in knobs.items()},
        },
    )  # fmt: skip
    for case in CASES:
        job.check(case)
