"""Handlers: how a `TorchState` saves, restores and sends values, by their type."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from hororing._engine import state as engine_state
from hororing.elastic.variables import broadcast
from hororing.torch.elastic.sampler import ElasticSampler
from hororing.torch.state import (
    Send,
    broadcast_from,
    broadcast_parameters,
    send_optimizer_state,
    send_parameters,
)


class StateHandler:
    """Saves, restores and sends one value of a `TorchState`. A base class.

    Attributes
    ----------
    value : array_like
        The value.
    send : callable
        How `sync` sends tensors.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.send: Send = broadcast_from(0)

    def save(self) -> None:
        """Copy the contents of the value."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Send the contents of rank 0's value to all ranks. All ranks call it.

        Does not change the saved copy: `TorchState` saves when all values have been received.
        """
        raise NotImplementedError

    def parts(self) -> dict[str, str]:
        """Return the form of each part of the value that must be the same on all ranks."""
        return {}

    def kept(self) -> Any:
        """Return the copy of `save`, which can be pickled, for `TorchState.save_to`."""
        raise TypeError(f"save_to: {type(self).__name__} has no method kept")

    def take(self, kept: Any) -> None:
        """Adopt the result of `kept` from another process."""
        raise TypeError(f"save_to: {type(self).__name__} has no method take")

    def reset(self) -> None:
        """Adapt to the rank and the number of ranks, which have changed."""

    # Whether the next three methods exist. If not, a failure goes back to the last commit.
    can_mark = False

    def mark(self) -> None:
        """Copy the contents that the steps of optimizers do not change."""
        raise NotImplementedError

    def go_back(self) -> None:
        """Restore that copy."""
        raise NotImplementedError

    def sync_marked(self) -> None:
        """Like `sync`, with the contents that `mark` copies."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Handle another value from now on, and save it."""
        self.value = value
        self.save()


class ObjectWithStateHandler(StateHandler):
    """Handles values with a `state_dict` of plain objects, such as learning rate schedulers."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    _saved: Any = None

    def save(self) -> None:
        """Copy the `state_dict`, into the memory of the last copy if it fits."""
        self._saved = _copied(self.value.state_dict(), self._saved)

    def restore(self) -> None:
        """Load a copy of the copy, because the value may change the loaded objects."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def kept(self) -> Any:
        """Return the copy."""
        return self._saved

    def take(self, kept: Any) -> None:
        """Keep it as the copy, and load it."""
        self._saved = kept
        self.restore()

    def sync(self) -> None:
        """Send and load the `state_dict`."""
        state = broadcast(self.value.state_dict())
        if engine_state.rank() != 0:
            self.value.load_state_dict(state)

    can_mark = True

    def mark(self) -> None:
        """Copy the `state_dict`."""
        self._marked = copy.deepcopy(self.value.state_dict())

    def go_back(self) -> None:
        """Load a copy of the copy."""
        self.value.load_state_dict(copy.deepcopy(self._marked))

    def sync_marked(self) -> None:
        """Send and load all of it."""
        self.sync()


@torch.no_grad()
def _copied(state: Any, before: Any) -> Any:
    """Copy a `state_dict`, into `before` if it fits: new memory takes several times as long."""
    new, old = _tensors(state), _tensors(before)
    if not new or list(map(_kind, new)) != list(map(_kind, old)):
        return copy.deepcopy(state)
    torch._foreach_copy_(old, new)
    return copy.deepcopy(state, {id(each): kept for each, kept in zip(new, old, strict=True)})


def _tensors(state: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(state) if isinstance(each, torch.Tensor)]


def _kind(tensor: torch.Tensor) -> object:
    """Return a value that is equal for tensors that can be copied into each other."""
    if tensor.layout is not torch.strided or 0 in tensor.stride():
        return object()
    return type(tensor), tensor.shape, tensor.dtype, tensor.device


class ModelStateHandler(ObjectWithStateHandler):
    """Handles a `torch.nn.Module`."""

    _holders: list[Any] | None = None
    _marked: Any = ()

    def parts(self) -> dict[str, str]:
        """Return dtype and shape of each parameter and buffer."""
        return {
            name: f"{each.dtype} {list(each.shape)}".removeprefix("torch.")
            for name, each in self.value.state_dict().items()
            if isinstance(each, torch.Tensor) and not is_lazy(each)
        }

    def restore(self) -> None:
        """Load the copy. Loading copies tensors by itself."""
        same = {id(each): each for each in _tensors(self._saved)}
        self.value.load_state_dict(copy.deepcopy(self._saved, same))

    def sync(self) -> None:
        """Send parameters and buffers in place, and the other entries of the `state_dict`."""
        state = self.value.state_dict()
        tensors = {
            name: each
            for name, each in state.items()
            # Modules get their extra state by loading, also if it is a tensor.
            if isinstance(each, torch.Tensor) and not name.endswith("_extra_state")
        }
        send_parameters(tensors, self.send)
        if len(tensors) < len(state):
            others = broadcast({name: state[name] for name in state.keys() - tensors.keys()})
            self.value.load_state_dict({**tensors, **others})

    @property
    def can_mark(self) -> bool:  # type: ignore[override]
        """Whether the module holds only tensors."""
        plain = torch.nn.Module.get_extra_state
        return all(type(each).get_extra_state is plain for each in self.value.modules())

    def mark(self) -> None:
        """Copy the buffers. Optimizers change the parameters."""
        live, kept = self._buffers(), self._marked
        if live and [each.shape for each in live] == [each.shape for each in kept]:
            torch._foreach_copy_(kept, live)
        else:
            self._marked = [each.clone() for each in live]

    @torch.no_grad()
    def go_back(self) -> None:
        """Restore the buffers."""
        for live, kept in zip(self._buffers(), self._marked, strict=True):
            live.copy_(kept)

    def sync_marked(self) -> None:
        """Send the buffers in place."""
        named = [(f"buffer.{number}", each) for number, each in enumerate(self._buffers())]
        broadcast_parameters(named, root_rank=0)

    def _buffers(self) -> list[torch.Tensor]:
        # Modules may replace their buffers, but the set of modules with buffers must not change.
        if self._holders is None:
            self._holders = [each._buffers for each in self.value.modules() if each._buffers]
        return [each for held in self._holders for each in held.values() if each is not None]

    def set_value(self, value: Any) -> None:
        """Handle another module from now on, and save it."""
        self._holders = None
        super().set_value(value)


class OptimizerStateHandler(ObjectWithStateHandler):
    """Handles a `torch.optim.Optimizer`, plain or distributed."""

    def parts(self) -> dict[str, str]:
        """Return its class and the numbers of parameters in its groups."""
        sizes = [len(group["params"]) for group in self.value.param_groups]
        return {"groups": f"{type(self.value).__name__} of {sizes} parameters"}

    def sync(self) -> None:
        """Send state and options, as rank 0 has them: a new rank has none yet."""
        send_optimizer_state(self.value, 0, None, self.send)

    def restore(self) -> None:
        """Load a copy of the copy, and drop gradients: some may be reduced, and some not."""
        super().restore()
        self.value.zero_grad()

    def mark(self) -> None:
        """Copy the options, such as the learning rate. Steps change the state."""
        self._marked = self._options()

    def go_back(self) -> None:
        """Restore these options, and drop gradients."""
        self._set_options(self._marked)
        self.value.zero_grad()

    def sync_marked(self) -> None:
        """Send the options."""
        options = broadcast(self._options())
        if engine_state.rank() != 0:
            self._set_options(options)

    def _options(self) -> list[dict[str, Any]]:
        def copied(value: Any) -> Any:
            changes = isinstance(value, torch.Tensor | list | dict)
            return copy.deepcopy(value) if changes else value

        return [
            {key: copied(value) for key, value in group.items() if key != "params"}
            for group in self.value.param_groups
        ]

    def _set_options(self, options: list[dict[str, Any]]) -> None:
        for group, held in zip(self.value.param_groups, options, strict=True):
            group.update(copy.deepcopy(held))


class GradScalerStateHandler(ObjectWithStateHandler):
    """Handles a `torch.amp.GradScaler`, which may be in the middle of a step that is undone."""

    def restore(self) -> None:
        """Load a copy of the copy, and check the gradients of the next step again."""
        super().restore()
        self.value._per_optimizer_states.clear()

    def go_back(self) -> None:
        """Do the same with the copy of `mark`."""
        super().go_back()
        self.value._per_optimizer_states.clear()


class SamplerStateHandler(ObjectWithStateHandler):
    """Handles an `ElasticSampler`."""

    def reset(self) -> None:
        """Distribute the remaining samples over the present ranks."""
        self.value.reset()


_registry: list[tuple[Any, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, ObjectWithStateHandler),
    (torch.amp.GradScaler, GradScalerStateHandler),
]


def get_handler_registry() -> list[tuple[Any, type[StateHandler]]]:
    """Return pairs of types and their handlers. The first type that fits is used."""
    return _registry


def set_handler_registry(registry: Sequence[tuple[Any, type[StateHandler]]]) -> None:
    """Replace the types and their handlers, for new states."""
    global _registry
    _registry = list(registry)


def handler_for(value: Any) -> StateHandler | None:
    """Return a new handler for a value; None for a plain object."""
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return None
