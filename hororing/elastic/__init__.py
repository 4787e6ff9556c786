"""Training that continues when ranks die, leave or join, for every framework.

`run` is the loop around a training function, `State` the values that the function must not lose.
Scripts use the names in hororing.torch.elastic, hororing.tensorflow.elastic and
hororing.keras.elastic; see docs/elastic.md.
"""

from __future__ import annotations

from hororing._engine.membership import history
from hororing.elastic.loop import run, run_fn
from hororing.elastic.state import ObjectState, State
from hororing.errors import HororingInternalError, HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "HororingInternalError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "history",
    "run",
    "run_fn",
]
