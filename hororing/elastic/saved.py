"""The last commit in a file, for a job that restarts: `State.save_to`."""

from __future__ import annotations

import os
import pickle
import secrets
from pathlib import Path
from typing import Any, Final

_FORMAT: Final = "hororing elastic state 1"


def write(path: Path, commits: int, kept: Any) -> None:
    """Write a commit to a file that only this user can read, atomically. OSError."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    number = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(number, "wb") as file:
            pickle.dump((_FORMAT, commits, kept), file, protocol=5)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def read(path: Path) -> tuple[int, Any] | None:
    """Return the number of commits and the state, or None if the file does not exist.

    ValueError : it is not a state, or cannot be read.
    """
    try:
        with open(path, "rb", opener=_open_without_wait) as file:
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


def _open_without_wait(path: str, flags: int) -> int:
    """Open it. An empty pipe is then a file without a state, not a hang."""
    return os.open(path, flags | os.O_NONBLOCK)
