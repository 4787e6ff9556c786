"""TorchState: models, optimizers, samplers, and plain objects."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch

from hororing import job, objects
from hororing.elastic.state import ObjectState
from hororing.torch.elastic.sampler import ElasticSampler
from hororing.torch.state import broadcast_optimizer_state, broadcast_parameters

# The name is always the same: ranks that have come later have counted fewer calls.
_broadcast = functools.partial(objects.broadcast_object, root_rank=0, name="elastic.state")


class StateHandler:
    """Saves, restores and sends one value of a `TorchState`. A base class.

    Attributes
    ----------
    value : the value.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy of what the value holds."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give the values of all ranks what that of rank 0 holds. All ranks call it.

        What was saved stays: `TorchState` saves when all values have come.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the rank and the number of ranks, which have changed."""

    def set_value(self, value: Any) -> None:
        """Handle another value from now on, and save it."""
        self.value = value
        self.save()


class ObjectWithStateHandler(StateHandler):
    """Handles what has a `state_dict` of plain objects: a learning rate scheduler, say."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """Copy the `state_dict`."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load a copy of the copy: the value may change what it loads."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Send and load the `state_dict`."""
        state = _broadcast(self.value.state_dict())
        if job.rank() != 0:
            self.value.load_state_dict(state)


class ModelStateHandler(ObjectWithStateHandler):
    """Handles a `torch.nn.Module`."""

    def sync(self) -> None:
        """Send parameters and buffers into place, and what else the `state_dict` holds."""
        state = self.value.state_dict()
        tensors = {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
        broadcast_parameters(tensors, root_rank=0)
        if len(tensors) < len(state):
            others = _broadcast({name: state[name] for name in state.keys() - tensors.keys()})
            self.value.load_state_dict({**tensors, **others})


class OptimizerStateHandler(ObjectWithStateHandler):
    """Handles a `torch.optim.Optimizer`, plain or distributed."""

    def sync(self) -> None:
        """Send state and options. Which there are, rank 0 decides: a new rank has none yet."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(ObjectWithStateHandler):
    """Handles an `ElasticSampler`."""

    def reset(self) -> None:
        """Deal the samples that are left to the ranks of now."""
        self.value.reset()


_registry: list[tuple[Any, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, ObjectWithStateHandler),
    (torch.amp.GradScaler, ObjectWithStateHandler),
]


def get_handler_registry() -> list[tuple[Any, type[StateHandler]]]:
    """Return the types that have handlers, with those. The first type that fits counts."""
    return _registry


def set_handler_registry(registry: Sequence[tuple[Any, type[StateHandler]]]) -> None:
    """Replace the types that have handlers, for states that are made from now on."""
    global _registry
    _registry = list(registry)


def _handler_for(value: Any) -> StateHandler | None:
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return None


class TorchState(ObjectState):
    """A state of models, optimizers, samplers, schedulers and plain objects, as attributes.

    >>> state = TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)

    `save` copies all of it: it takes as much memory again as model and optimizer do. The handlers
    of `get_handler_registry` say how, by type. Anything else is pickled.

    Parameters
    ----------
    model, optimizer : are attributes of these names, unless None.
    kwargs : any further ones. All ranks pass the same names and types.
    """

    _handlers: dict[str, StateHandler]

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        object.__setattr__(self, "_handlers", {})
        kwargs.update({"model": model} if model is not None else {})
        kwargs.update({"optimizer": optimizer} if optimizer is not None else {})
        for name in list(kwargs):
            handler = _handler_for(kwargs[name])
            if handler is not None:
                self._handlers[name] = handler
                object.__setattr__(self, name, kwargs.pop(name))
        super().__init__(_broadcast, job.rank, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Save a new model, optimizer or the like in its place; objects are only set."""
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Copy everything."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to what was saved last; gradients that are being reduced are forgotten."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give every rank what rank 0 has, and save it."""
        for name in sorted(self._handlers):
            self._handlers[name].sync()
        super().sync()
        for handler in self._handlers.values():
            handler.save()

    def reset(self) -> None:
        """Adapt the handlers' values: an ElasticSampler deals samples to the ranks of now."""
        for handler in self._handlers.values():
            handler.reset()


__all__ = [
    "ModelStateHandler",
    "ObjectWithStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]
