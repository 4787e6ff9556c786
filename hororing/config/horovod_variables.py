"""Horovod's environment variables without a knob, and what happens instead.

Variables with a knob are in `hororing.config.knobs`. None of these is an error, so a job script for
Horovod runs unchanged. If it asks for something that hororing does not do, rank 0 says so.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

PREFIX = "HOROVOD_"


def is_true(text: str) -> bool:
    """Horovod's rule for booleans: the number that the text begins with is positive."""
    found = re.match(r"\s*([+-]?\d+)", text)
    return found is not None and int(found[1]) > 0


@dataclass(frozen=True)
class Unused:
    """A variable without an effect, which its user may miss."""

    name: str
    instead: str
    asks: Callable[[str], bool] = is_true  # whether a value asks for something that hororing lacks


def _other_than(*words: str) -> Callable[[str], bool]:
    return lambda text: text.lower() not in words


UNUSED = (
    Unused("HOROVOD_AUTOTUNE", "the defaults are as fast as any setting that was found (ADR 38)"),
    Unused(
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        "always, if the ranks of a host share memory; HORORING_BACKEND=host: never",
    ),
    Unused(
        "HOROVOD_HIERARCHICAL_ALLGATHER",
        "always, if the ranks of a host share memory; HORORING_BACKEND=host: never",
    ),
    Unused(
        "HOROVOD_TORUS_ALLREDUCE",
        "hosts whose ranks share memory reduce in three phases (docs/algorithms.md)",
    ),
    Unused("HOROVOD_DISABLE_GROUP_FUSION", "groups may share a batch with other tensors"),
    Unused(
        "HOROVOD_MPI_THREADS_DISABLE",
        "MPI is asked for MPI_THREAD_MULTIPLE, though only the engine's thread calls it",
    ),
    Unused(
        "HOROVOD_CONTROLLER",
        "ranks negotiate through shared memory, TCP or MPI: HORORING_TRANSPORT",
        _other_than("mpi"),
    ),
    Unused(
        "HOROVOD_CPU_OPERATIONS",
        "hororing has its own arithmetic and uses shared memory, TCP or MPI",
        _other_than("mpi"),
    ),
    Unused("HOROVOD_NUM_NCCL_STREAMS", "the batches of a device use one stream", _other_than("1")),
    Unused(
        "HOROVOD_GLOO_TIMEOUT_SECONDS",
        "HORORING_TIMEOUT_S is the time without progress; hororun --start-timeout that of ssh",
        _other_than("30"),
    ),
    Unused("HOROVOD_ENABLE_XLA_OPS", "no operation is compiled by XLA"),
    Unused("HOROVOD_ELASTIC", "a lost rank ends the job, unless hororun --min-np has started it"),
    Unused("HOROVOD_SIZE", "ranks are the processes that the launcher started", lambda text: True),
)


def notes(environ: Mapping[str, str], used: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Return log records about the variables of `environ`: level of Python's logging, and text.

    Parameters
    ----------
    used : frozenset of str
        Names that knobs read.
    """
    given = {
        name: text.strip()
        for name, text in sorted(environ.items())
        if name.startswith(PREFIX) and name not in used and text.strip()
    }
    for row in UNUSED:
        if row.name in given and row.asks(text := given.pop(row.name)):
            yield logging.WARNING, f"{row.name}={text} has no effect here: {row.instead}"
    if given:
        yield logging.INFO, f"ignored, since they have no meaning here: {', '.join(given)}"
