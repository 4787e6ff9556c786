"""The history of an elastic job: a line of JSON for each generation (membership.jsonl)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from hororing._job.rendezvous.generations import World


def record(file: Path, world: World, cause: str, log: Callable[[str], None]) -> None:
    """Append a generation: when and why it formed, the step it began at, its members by rank.

    If that is impossible, `log` gets an error text: the job goes on.
    """
    line = {
        "generation": world.generation,
        "time": time.time(),
        "step": max(each.step for each in world.members),
        "cause": cause,
        "members": [asdict(each) for each in world.members],
    }
    try:
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
    except OSError as error:
        log(f"ERROR: cannot write {file}: {error.strerror}; it lacks a generation")
