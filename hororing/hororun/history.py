"""The history of an elastic job: a line of JSON for each generation (membership.jsonl)."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from hororing.rendezvous.generations import World


def record(file: Path, world: World, cause: str) -> None:
    """Append a generation: when and why it formed, the step it began at, its members by rank."""
    line = {
        "generation": world.generation,
        "time": time.time(),
        "step": max(each.step for each in world.members),
        "cause": cause,
        "members": [asdict(each) for each in world.members],
    }
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")
