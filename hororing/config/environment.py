"""The environment variables of this process: the only place that reads or writes them."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

# Set by hororun or by hand: this process's rank, and where ranks meet (hororing/_job/bootstrap.py).
VARIABLES = (
    "HORORING_RANK", "HORORING_SIZE", "HORORING_LOCAL_RANK", "HORORING_LOCAL_SIZE",
    "HORORING_RENDEZVOUS", "HORORING_JOB", "HORORING_SECRET_FD", "HORORING_SECRET_FILE",
    "HORORING_SECRET_KEY", "HORORING_INSECURE", "HORORING_NUM_REPLICAS", "HORORING_ELASTIC",
    "HORORING_HOSTNAME", "HORORING_PROCESS",
)  # fmt: skip


def run_alone() -> None:
    """Make this process a job of one rank, whatever started it."""
    os.environ["HORORING_ALONE"] = "1"


def write_no_files() -> None:
    """Remove the variables that name files of the user's job, which this process would replace."""
    for name in ("TIMELINE", "TIMELINE_STEPS", "FLIGHT_RECORDER"):
        os.environ.pop(f"HORORING_{name}", None)
    os.environ.pop("HOROVOD_TIMELINE", None)


def live() -> MutableMapping[str, str]:
    """Return the environment itself: changes take effect."""
    return os.environ


def variables() -> dict[str, str]:
    """Return a copy of the environment, for processes that this one starts."""
    return dict(os.environ)


def inherited() -> dict[str, str]:
    """Return `variables()` without the place of this process: without VARIABLES."""
    return {name: text for name, text in os.environ.items() if name not in VARIABLES}


def become(variables: Mapping[str, str]) -> None:
    """Make this process a rank, if another program has started it."""
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)
