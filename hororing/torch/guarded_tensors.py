"""The tensors of a model and an optimizer, as a guard compares them: names, digests, bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from hororing._adapters.replica_check import Digest, digest
from hororing._engine.state import rank
from hororing.guard.comparison import Bytes, Item
from hororing.guard.findings import Finding, NonFinite
from hororing.guard.sums import Sum, take
from hororing.torch._optimizer import grad_scaler
from hororing.torch._optimizer.digests import digests
from hororing.torch._optimizer.reducer import Reducer
from hororing.torch.finite import Finite
from hororing.torch.snapshot import Snapshot

_STEPS: Final = "steps taken"


class Tensors:
    """The tensors of a model and an optimizer: a `hororing.guard.watch.Source`."""

    remedy = (
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0) and "
        "hvd.broadcast_optimizer_state(optimizer, root_rank=0)"
    )

    def __init__(self, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer) -> None:
        self.model: Callable[[], torch.nn.Module | None] = (
            (lambda: None) if model is None else weakref.ref(model)
        )
        self.optimizer = weakref.ref(optimizer)
        self.steps = 0  # of this rank, since `begin`
        self.finite: Finite | None = None  # what looks at gradients
        self.snapshot: Snapshot | None = None
        self._excluded: dict[str, list[str]] = {}
        self._held: dict[str, tuple[str, Any]] = {}  # by name: its kind, and the tensor or number

    def begin(self) -> None:
        """Count steps from 0."""
        self.steps = 0
        self._hook()
        self.sums()  # of reductions before this rank joined

    @property
    def _reducer(self) -> Reducer | None:
        """What sends gradients to the engine as they are, or looks at them, if it does."""
        reducer = getattr(self.optimizer(), "_reducer", None)
        return reducer if isinstance(reducer, Reducer) else None

    def _hook(self) -> None:
        """Follow the parameters of the model, if hooks look at gradients."""
        if self.finite is not None:
            names = {} if self._reducer is not None else self.names()
            self.finite.follow({p: name for p, name in names.items() if not _is_sharded(p)})

    def shown(self, gradient: str) -> str:
        """Return the name of a parameter, given that of its gradient."""
        param = None if self._reducer is None else self._reducer.reduced.get(gradient)
        return gradient if param is None else self.names().get(param, gradient)

    def sums(self) -> Sequence[Sum]:
        """See `hororing.guard.watch.Source`."""
        reducer = self._reducer
        if reducer is None or self.finite is None:
            return ()
        reduced = reducer.reduced
        found = take(reducer.members, reduced)
        if not found:
            return ()
        orders = {name: order for name, order in reducer.orders.items() if name in reduced}
        names = self.names()
        sent = sorted(orders, key=orders.__getitem__)
        result = []
        for at, name in enumerate(sent):
            if name in found:
                before = [each for each in sent[:at] if each not in found]
                above = names.get(reduced[before[-1]], before[-1]) if before else ""
                shown, size = names.get(reduced[name], name), reduced[name].numel()
                result.append(Sum(shown, size, at, above, found[name].parts))
        return result

    def names(self) -> dict[torch.Tensor, str]:
        """Return the names of all parameters: those of the model, or of its optimizer."""
        model, optimizer = self.model(), self.optimizer()
        assert optimizer is not None
        names: dict[torch.Tensor, str] = {}
        if model is not None:
            names |= {param: name for name, param in plain(model).named_parameters()}
        known = getattr(optimizer, "_parameter_names", {})
        for number, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                if param not in names:
                    name = known.get(param, f"group {number}, parameter {index}")
                    taken = name in names.values()
                    names[param] = f"{name} (of the optimizer)" if taken else name
        return names

    def look_at_shards(self) -> None:
        """Look at the gradients of parameters of which this rank has a part.

        FSDP sums them without hooks.
        """
        for param, name in self.names().items() if self.finite is not None else ():
            if _is_sharded(param) and param.grad is not None:
                assert self.finite is not None
                self.finite.look(f"{name} (a shard)", param.grad)

    def _listed(self) -> Iterator[tuple[str, str, Any]]:
        """Yield kind, name, and tensor or number, of everything that may be compared."""
        optimizer = self.optimizer()
        assert optimizer is not None
        names = self.names()
        self._excluded = {}
        for param, name in names.items():
            if self._has_here(param, name):
                yield "parameter", name, param
        yield from self._buffers()
        sharded = any(
            each.__name__ == "ZeroRedundancyOptimizer" for each in type(optimizer).__mro__
        )
        for param, state in optimizer.state.items():
            if not isinstance(param, torch.Tensor) or param not in names:
                continue  # what compression keeps is of one rank
            for key, value in state.items():
                name = f"{names[param]}: {key}"
                if sharded or _is_flat(param):
                    self._excluded.setdefault("sharded", []).append(name)
                elif isinstance(value, int | float) or (
                    isinstance(value, torch.Tensor) and self._has_here(value, name)
                ):
                    yield "optimizer", name, value
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                parts = value if isinstance(value, tuple) else (value,)
                for index, part in enumerate(parts):
                    where = f"[{index}]" if parts is value else ""
                    if isinstance(part, int | float) or _is_number(part):
                        yield "setting", f"{key}{where} of group {number}", float(part)
        yield "setting", _STEPS, self.steps

    def _buffers(self) -> Iterator[tuple[str, str, Any]]:
        model = self.model()
        for path, module in () if model is None else plain(model).named_modules():
            for key, buffer in module.named_buffers(recurse=False):
                name = f"{path}.{key}" if path else key
                if _has_own_statistics(module):
                    self._excluded.setdefault("batch norm", []).append(name)
                elif key in module._non_persistent_buffers_set:
                    self._excluded.setdefault("not in state_dict", []).append(name)
                elif self._has_here(buffer, name):
                    yield "buffer", name, buffer

    def _has_here(self, tensor: torch.Tensor, name: str) -> bool:
        """Whether all elements are here, and ranks should have the same ones."""
        placements = getattr(tensor, "placements", None)
        if _is_flat(tensor) or (placements and not all(p.is_replicate() for p in placements)):
            self._excluded.setdefault("sharded", []).append(name)
        elif tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
            self._excluded.setdefault("without elements of its own", []).append(name)
        else:
            return True
        return False

    def items(self) -> Iterable[Item]:
        """See `hororing.guard.watch.Source`."""
        self._held, tensors, kinds = {}, [], {}
        self._hook()  # some may be new
        for of, name, value in self._listed():
            if isinstance(value, torch.Tensor):
                value = _local(value)
                tensors.append((name, value))
            else:
                value = np.array(value, np.float64)
                yield Item.from_digest(of, Digest(name, "float64[]", digest(value)))
            self._held[name] = of, value
            kinds[name] = of
        for found in digests(tensors):
            yield Item.from_digest(kinds[found.name], found)

    def read(self, name: str) -> Bytes:
        """See `hororing.guard.watch.Source`."""
        _, value = self._held[name]
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
                return cast(Bytes, flat.view(torch.uint8).cpu().numpy().copy())
        return cast(Bytes, value.reshape(1).view(np.uint8).copy())

    def write(self, name: str, raw: Bytes) -> None:
        """See `hororing.guard.watch.Source`."""
        of, value = self._held[name]
        optimizer = self.optimizer()
        assert optimizer is not None
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.copy_(torch.from_numpy(raw).view(value.dtype).reshape(value.shape))
        elif name == _STEPS:
            self.steps = int(raw.view(np.float64)[0])
        else:
            number = raw.view(np.float64)[0].item()
            if of == "setting":
                self._set(name, number, optimizer)
                return
            names = {name: param for param, name in self.names().items()}
            param, _, key = name.rpartition(": ")
            state = optimizer.state[names[param]]
            state[key] = type(state[key])(number)

    @staticmethod
    def _set(name: str, number: float, optimizer: torch.optim.Optimizer) -> None:
        key, _, place = name.partition(" of group ")
        key, bracket, index = key.partition("[")
        group = optimizer.param_groups[int(place)]
        old = group[key]
        if isinstance(old, torch.Tensor):
            old.fill_(number)
            return
        if bracket:
            at = int(index.rstrip("]"))
            group[key] = (*old[:at], type(old[at])(number), *old[at + 1 :])
        else:
            group[key] = type(old)(number)

    def settle(self) -> None:
        """See `hororing.guard.watch.Source`."""
        if self.finite is not None:
            self.finite.settle()

    def scale(self) -> float | None:
        """See `hororing.guard.watch.Source`."""
        return grad_scaler.scale_in_use()

    def replaced(self) -> Sequence[str]:
        """See `hororing.guard.watch.Source`."""
        model, optimizer = self.model(), self.optimizer()
        known: Mapping[torch.Tensor, str] = getattr(optimizer, "_parameter_names", {})
        if model is None:
            return []
        current = dict(plain(model).named_parameters(remove_duplicate=False))
        known = {param: name.removeprefix("module.") for param, name in known.items()}
        mine = {*known}
        return sorted(
            name
            for param, name in known.items()
            if name in current and current[name] is not param and current[name] not in mine
        )

    def keep(self, finding: Finding | NonFinite) -> None:
        """See `hororing.guard.watch.Source`."""
        if self.snapshot is not None:
            self.snapshot.write(str(finding), finding.step, rank())

    def excluded(self) -> Mapping[str, Sequence[str]]:
        """See `hororing.guard.watch.Source`."""
        return self._excluded


def plain(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside a DistributedDataParallel."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _has_own_statistics(module: torch.nn.Module) -> bool:
    """Whether it is a batch norm that each rank updates from its own data."""
    norm = torch.nn.modules.batchnorm._NormBase
    return isinstance(module, norm) and not isinstance(module, torch.nn.SyncBatchNorm)


def _is_flat(tensor: torch.Tensor) -> bool:
    """Whether it is a part of several parameters (the first version of FSDP)."""
    return bool(getattr(tensor, "_is_flat_param", False))


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "placements") or _is_flat(tensor)


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return local
