"""The last commit in a file, for a job that restarts: `State.save_to`."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, Final

_FORMAT: Final = "hororing elastic state 1"


def write(path: Path, commits: int, kept: Any) -> None:
    """Write a commit to a file, atomically. OSError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("wb") as file:
            pickle.dump((_FORMAT, commits, kept), file, protocol=5)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def read(path: Path) -> tuple[int, Any] | None:
    """Return the number of commits and the state; None: the file does not exist.

    ValueError : it is not a state, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            form, commits, kept = pickle.load(file)
    except FileNotFoundError:
        return None
    except Exception as error:  # unpickling can raise anything
        raise ValueError(
            f"save_to: {path} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if form != _FORMAT:
        raise ValueError(f"save_to: {path} is not a state saved by hororing")
    return int(commits), kept
