"""Elastic training with PyTorch::

    import hororing.torch as hvd

    hvd.init()
    model = ...
    optimizer = hvd.DistributedOptimizer(...)
    sampler = hvd.elastic.ElasticSampler(dataset)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

    @hvd.elastic.run
    def train(state):
        ...
        state.commit()

    train(state)

Start it with hororun --min-np. See docs/elastic.md.
"""

from __future__ import annotations

import importlib

from hororing import elastic
from hororing._engine import state as engine_state
from hororing.elastic import *  # noqa: F403
from hororing.torch.elastic.handlers import (
    ModelStateHandler,
    ObjectWithStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)
from hororing.torch.elastic.sampler import ElasticSampler
from hororing.torch.elastic.state import TorchState

# The first optimizer of a process imports it, which takes 1 to 2 s.
engine_state.before_joining(lambda: importlib.import_module("torch._dynamo"))

__all__ = [
    "ElasticSampler",
    "ModelStateHandler",
    "ObjectWithStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]
__all__ += elastic.__all__
