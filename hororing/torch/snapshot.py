"""Snapshot: what one process needs to take again the step in which a guard has found something."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from hororing._engine.logs import logger

_MOST: Final = 3  # files of a rank


class Snapshot:
    """Keeps the latest batch, and writes files into a folder. `model` returns the model."""

    def __init__(self, folder: str | os.PathLike[str], model: Callable[[], Any]) -> None:
        self._folder, self._model = Path(folder), model
        self._latest: dict[str, Any] = {"batch": None, "inputs": (), "random": _random_states()}
        self._written = 0

    def note(self, batch: int, inputs: tuple[Any, ...]) -> None:
        """Note what a step is about to compute with. Does not copy `inputs`."""
        self._latest = {"batch": batch, "inputs": inputs, "random": _random_states()}

    def write(self, text: str, step: int, rank: int) -> None:
        """Write a file for this rank, unless it has written some already."""
        if self._written == _MOST:
            return
        self._written += 1
        model = self._model()
        kept = {
            **self._latest, "step": step, "rank": rank, "finding": text,
            "model": None if model is None else model.state_dict(),
        }  # fmt: skip
        path = self._folder / f"step{step}-rank{rank}.pt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as to:
                torch.save(kept, to)
        except OSError as error:  # no reason to end the job, nor to hide what was found
            logger.warning("guard: cannot write the snapshot %s: %s", path, error)
        else:
            logger.warning("guard: %s has what rank %d computed in step %d", path, rank, step)


def _random_states() -> dict[str, Any]:
    """Return the states of the random generators, as types that `torch.load` reads by default."""
    name, words, *rest = np.random.get_state()
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(words).astype(np.int64)), *rest),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a snapshot, and set the random generators as they were before its step.

    Returns
    -------
    dict
        "step", "rank", "batch" and "inputs" as the script has noted them, "model" (its
        `state_dict`, before the step), and "finding", the text.

    Examples
    --------
    Make the model first: that may use random numbers.

    >>> kept = snapshot.restore("snapshots/step812-rank3.pt")  # doctest: +SKIP
    >>> model.load_state_dict(kept["model"])  # doctest: +SKIP
    >>> loss_of(model, *kept["inputs"]).backward()  # doctest: +SKIP
    """
    kept: dict[str, Any] = torch.load(path, weights_only=True)
    states = kept.pop("random")
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    name, words, *rest = states["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), *rest))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
    return kept
