"""The file of one run: JSON lines, each written at once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np


class RunFile:
    """Appends to a record, as one process.

    Each line is one unbuffered write: a run that is killed leaves everything up to its last line.

    Parameters
    ----------
    path : path
        Of the file. It is opened, and its folder created, with the first line.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(path)
        self._file = -1
        self._begin = time.monotonic()

    @classmethod
    def of(cls, folder: str | os.PathLike[str], name: str) -> RunFile:
        """The file of a run's name; ValueError unless it is a plain name."""
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"name={name!r} must be that of a file in {folder}")
        return cls(os.path.join(folder, f"{name}.jsonl"))

    def begin(self, run: Mapping[str, Any]) -> None:
        """Write the first line: what the run is."""
        self._write({"kind": "run", **run})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write metrics."""
        self._write({"kind": "metrics", "step": step, "values": values, **self._now()})

    def note(self, text: str) -> None:
        """Write a line of text."""
        self._write({"kind": "note", "text": text, **self._now()})

    def close(self, status: str) -> None:
        """Write the end: "completed", "pruned" or "failed". Without a first line, do nothing."""
        if self._file >= 0:
            self._write({"kind": "end", "status": status, **self._now()})
            self.leave()

    def leave(self) -> None:
        """Close the file without an end."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _now(self) -> dict[str, float]:
        return {"time": time.time(), "seconds": round(time.monotonic() - self._begin, 6)}

    def _open(self) -> None:
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o666)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # behind a line that was cut short: see `read_run`

    def _write(self, line: dict[str, Any]) -> None:
        if self._file < 0:
            self._open()
        data = memoryview((json.dumps(_plain(line), allow_nan=False) + "\n").encode())
        while data:
            data = data[os.write(self._file, data) :]


def _plain(value: Any) -> Any:
    """`value` in JSON's types; values of other types become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)  # "nan", "inf", "-inf": float() reads them
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
