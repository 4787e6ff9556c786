"""The conformance suite, by every adapter on 1 to 4 ranks. See conformance/."""

from __future__ import annotations

import functools
import os
from typing import Any

import mpirun
import pytest
import schedules
import tiers
from conformance import gradients, refusals, results
from conformance.players import PLAYERS, Player, available, player_of

import hororing.numpy as hvd

# TensorFlow takes seconds to import: its two modes share processes, and there is no job of 4.
JOBS = [
    *(("numpy torch", "auto", size) for size in (1, 2, 3, 4)),
    ("numpy", "mpi", 3),
    ("numpy", "tcp", 3),
    *(("tensorflow function", "auto", size) for size in (1, 2, 3)),
]
# MPI plays the results in test_conformance_algorithms.py, too.
PUSH = [("numpy torch", "auto", 1), ("numpy torch", "auto", 3), ("tensorflow function", "auto", 2)]

# Collectives of one random schedule: of NumPy, on all sizes together, 10,000.
CALLS = {"numpy": 840, "torch": 150, "tensorflow": 100, "function": 25}
SCHEDULES = 3


def begin(player: Player) -> None:
    refusals.not_initialized(player)
    hvd.init()


def random_calls(player: Player) -> None:
    """Schedules of their own, each from init to shutdown, with sets, names and a cache."""
    world = hvd.size()
    hvd.shutdown()
    for number in range(SCHEDULES):
        schedules.play(player, mpirun.seed() + number, CALLS[player.name], world)


def end(player: Player) -> None:
    refusals.not_initialized(player)


def cases() -> dict[str, Any]:
    """Every case by its name, in their order."""
    found = {
        name: case
        for room in (results, gradients, refusals)
        for name, case in vars(room).items()
        if name.startswith("case_")
    }
    return {"case_begin": begin, **found, "case_random_calls": random_calls, "case_end": end}


def applies(case: str, player: str) -> bool:
    return PLAYERS[player].differentiable or not getattr(gradients, case, None)


def play(player: str, case: str) -> None:
    cases()[case](player_of(player))


# What the ranks find here: cases of the players of their job.
for _player in os.environ.get("CONFORMANCE_PLAYERS", " ".join(PLAYERS)).split():
    for _case in cases():
        if applies(_case, _player):
            globals()[f"{_case}_by_{_player}"] = functools.partial(play, _player, _case)


@functools.cache
def job(players: str, transport: str, size: int) -> mpirun.Job:
    return mpirun.run(
        __file__, size, script=False, timeout_s=240,
        environment={
            "CONFORMANCE_PLAYERS": players,
            "HORORING_TRANSPORT": transport,
            "HORORING_DYNAMIC_PROCESS_SETS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        },
    )  # fmt: skip


@pytest.mark.timeout(250)  # the first test of a job waits for all of it
@pytest.mark.parametrize(
    ("players", "transport", "size", "player", "case"),
    [
        pytest.param(
            *each,
            player,
            case,
            id=f"{player}-{each[1]}-{each[2]}-{case[5:]}",
            marks=[] if each in PUSH else [tiers.full],
        )
        for each in JOBS
        for player in each[0].split()
        for case in cases()
        if applies(case, player)
    ],
)
def test_case(players: str, transport: str, size: int, player: str, case: str):
    if not available(player):
        pytest.skip(f"{player} is not installed")
    job(players, transport, size).check(f"{case}_by_{player}")
