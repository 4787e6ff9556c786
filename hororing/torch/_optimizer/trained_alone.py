"""A warning, when a job of several ranks ends, that its ranks have trained without a reduction."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hororing._engine import state
from hororing._engine.logs import logger
from hororing._requests import handles
from hororing.torch._optimizer.distributed import Distributed


class _Steps:
    """Steps of plain optimizers since `init`."""

    is_watched = False
    number = 0
    submitted = 0  # number of requests when the first one ended


def _note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _Steps.is_watched or isinstance(optimizer, Distributed):
        return
    if _Steps.number == 0:
        _Steps.submitted = handles.submitted()
    _Steps.number += 1


def _begin() -> None:
    _Steps.is_watched = state.rank() == 0 and state.size() > 1
    _Steps.number = 0


def _end() -> None:
    """Warn, unless there was any request between two steps: gradients may be reduced by hand."""
    steps = _Steps.number if _Steps.is_watched else 0
    _Steps.is_watched = False
    if steps > 1 and handles.submitted() == _Steps.submitted:
        logger.warning(
            "%d optimizer steps, and nothing was reduced: each rank has trained a model of its "
            "own. Use hvd.DistributedOptimizer(optimizer, model.named_parameters())",
            steps,
        )


state.at_init(_begin)
state.before_shutdown(_end)
register_optimizer_step_post_hook(_note)
