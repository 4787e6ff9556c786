"""All cases of the suite, in their order."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import mpirun
import schedules

import hororing.numpy as hvd
from conformance import gradients, refusals, results
from conformance.players import PLAYERS, Player, player_of

# Collectives in a random schedule. NumPy makes 10,000 over all sizes.
CALLS = {"numpy": 840, "torch": 150, "tensorflow": 100, "function": 25, "jax": 40}
SCHEDULES = 3


def begin(player: Player) -> None:
    os.environ["HORORING_DYNAMIC_PROCESS_SETS"] = "1"
    refusals.not_initialized(player)
    hvd.init()


def random_calls(player: Player) -> None:
    """Play random schedules, each from init to shutdown, with sets, names and a cache."""
    world = hvd.size()
    hvd.shutdown()
    for number in range(SCHEDULES):
        schedules.play(player, mpirun.seed() + number, CALLS[player.name], world)


def cases() -> dict[str, Callable[[Player], Any]]:
    rooms = (results, gradients, refusals)
    found = {name: vars(room)[name] for room in rooms for name in mpirun.case_names(vars(room))}
    end = refusals.not_initialized
    return {"case_begin": begin, **found, "case_random_calls": random_calls, "case_end": end}


def cases_by(*players: str) -> dict[str, Callable[[], Any]]:
    """Return the names that a test file needs so that these players play the suite on its ranks."""
    return {
        f"{case}_by_{player}": functools.partial(play, player, case)
        for player in players
        for case in cases()
        if PLAYERS[player].differentiable or not hasattr(gradients, case)
    }


def play(player: str, case: str) -> None:
    cases()[case](player_of(player))
