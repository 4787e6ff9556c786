"""TorchState: models, optimizers, samplers, and plain objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from hororing._engine import membership, state
from hororing._job.rendezvous.generations import Member
from hororing.elastic.state import check_names
from hororing.elastic.stepped import SteppedState
from hororing.elastic.steps import Steps
from hororing.elastic.variables import broadcast
from hororing.torch._optimizer.distributed import Distributed, parameters
from hororing.torch._tensor.verbs import verbs
from hororing.torch.elastic.handlers import StateHandler, handler_for
from hororing.torch.elastic.sampler import ElasticSampler
from hororing.torch.elastic.sending import Sender, sources
from hororing.torch.state import broadcast_from


class TorchState(SteppedState):
    """A state of models, optimizers, samplers, schedulers and plain objects, as attributes.

    >>> state = TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)

    `save` copies all of them, which takes as much memory as model and optimizer do. Values are
    saved by the handlers of `get_handler_registry`, by type. All others are pickled.

    Parameters
    ----------
    model, optimizer : torch.nn.Module or torch.optim.Optimizer, optional
        Attributes of these names, unless None.
    kwargs : dict
        Further attributes. All ranks pass the same names and types.

    Raises
    ------
    TypeError : for a sampler of one rank that is not an `ElasticSampler`.
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
            handler = handler_for(kwargs[name])
            if handler is not None:
                self._handlers[name] = handler
                object.__setattr__(self, name, kwargs.pop(name))
            elif isinstance(kwargs[name], Sampler) and hasattr(kwargs[name], "rank"):
                raise TypeError(
                    f"TorchState: {name} has the samples of one rank, and all would get "
                    "those of rank 0; use hvd.elastic.ElasticSampler"
                )
        super().__init__(broadcast, state.rank, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Save a new model, optimizer or the like in its place; objects are only set."""
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    def _parts(self) -> dict[str, str]:
        parts = super()._parts()
        for name, handler in self._handlers.items():
            parts[name] = type(handler).__name__
            parts.update((f"{name}.{part}", form) for part, form in handler.parts().items())
        return parts

    def save(self) -> None:
        """Copy everything."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Restore the last saved values, and drop gradients in flight."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def _kept(self) -> Any:
        return {name: each.kept() for name, each in self._handlers.items()}, super()._kept()

    def _take(self, kept: Any) -> None:
        handled, objects = kept
        check_names(self._handlers, handled)
        super()._take(objects)
        for name, handler in self._handlers.items():
            handler.take(handled[name])

    def sync(self) -> None:
        """Send the values of rank 0 to all ranks, and save them."""
        for name in sorted(self._handlers):
            self._handlers[name].sync()
        super().sync()
        for handler in self._handlers.values():
            handler.save()

    def reset(self) -> None:
        """Adapt the handlers' values: an ElasticSampler distributes its samples again."""
        for handler in self._handlers.values():
            handler.reset()

    # -- every step as a transaction; see hororing.elastic.steps ---------------------------------

    def _synchronize(self, needed: bool) -> bool:
        if membership.is_elastic():
            for handler in self._handlers.values():
                if isinstance(handler.value, Distributed):
                    handler.value._join_generation()
        return super()._synchronize(needed)

    def _attach(self, steps: Steps | None) -> None:
        for handler in self._handlers.values():
            if isinstance(handler.value, Distributed | ElasticSampler):
                handler.value._steps = steps

    def _can_agree_on_steps(self) -> bool:
        values = [handler.value for handler in self._handlers.values()]
        stepped: set[int] = set()
        for each in values:
            if isinstance(each, torch.optim.Optimizer):
                if not (isinstance(each, Distributed) and each.agrees_on_steps):
                    return False
                stepped.update(map(id, parameters(each)))
        models = [each for each in values if isinstance(each, torch.nn.Module)]
        return (
            bool(stepped)
            and all(handler.can_mark for handler in self._handlers.values())
            and all(id(param) in stepped for model in models for param in model.parameters())
        )

    def _mark(self) -> None:
        for handler in self._handlers.values():
            handler.mark()
        super()._mark()

    def _go_back(self) -> None:
        for handler in self._handlers.values():
            handler.go_back()

    def _prepare_sync(self, members: Sequence[Member], lacks: Sequence[bool], alike: bool) -> None:
        found = sources(members, lacks) if alike else None
        send = Sender(state.rank(), found) if found else broadcast_from(0)
        for handler in self._handlers.values():
            handler.send = send

    def _sync_marked(self) -> None:
        for name in sorted(self._handlers):
            self._handlers[name].sync_marked()

    def _digest(self) -> int:
        return digest_of(self._stepped_tensors())

    def _stepped_tensors(self) -> Iterator[torch.Tensor]:
        for handler in self._handlers.values():
            if isinstance(handler.value, torch.nn.Module):
                yield from handler.value.parameters()
            elif isinstance(handler.value, torch.optim.Optimizer):
                for held in handler.value.state.values():
                    values = held.values() if isinstance(held, dict) else (held,)
                    yield from (each for each in values if isinstance(each, torch.Tensor))


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return a hash of the bits of all tensors, below 2**62."""
    total = 0
    for tensor in tensors:
        if tensor.layout is torch.sparse_coo:  # momentum of sparse gradients
            total += digest_of([tensor._indices(), tensor._values()])
            continue
        flat = verbs.adapter.dense(tensor.detach()).reshape(-1).view(torch.uint8)
        if flat.storage_offset() % 8:
            flat = flat.clone()
        # Words of the sum's own size are summed 20 times as fast as smaller ones.
        words = flat.numel() // 8 * 8
        total += int(flat[:words].view(torch.int64).sum()) + int(flat[words:].sum())
    return total % (1 << 62)


__all__ = ["TorchState"]
