"""The same parameters, optimizer state and objects on every rank."""

from __future__ import annotations

import io
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hororing._engine.state import rank
from hororing._requests import arguments, handles, plain
from hororing._requests.objects import allgather_object, broadcast_object
from hororing.torch._optimizer.distributed import Distributed
from hororing.torch._optimizer.gradient import zero_gradient
from hororing.torch._tensor.verbs import verbs


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor] | torch.Tensor],
    root_rank: int,
) -> None:
    """Overwrite `params` with those of rank `root_rank`, in place.

    Parameters
    ----------
    params : dict of str to torch.Tensor or iterable of (str, torch.Tensor) or torch.Tensor
        ``model.state_dict()``, a list of (name, tensor) pairs, or a list of tensors.

    Raises
    ------
    ValueError : not one of these; a generator such as ``model.named_parameters()`` must be made
        a list. A name that occurs twice. On every rank: when ranks do not hold the same names, or
        one of them has raised an error here.
    TypeError : a value is not a tensor; use `broadcast_object` for it.

    Examples
    --------
    >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    send_parameters(params, broadcast_from(root_rank))


# Fills tensors, which have names, on all ranks or on some; all ranks make the same calls.
Send = Callable[[Sequence[tuple[str, torch.Tensor]]], None]


def broadcast_from(root_rank: int) -> Send:
    """Send by broadcasts."""

    def send(named: Sequence[tuple[str, torch.Tensor]]) -> None:
        handles.wait_all(
            [verbs.broadcast_async_(tensor, root_rank, name) for name, tensor in named]
        )

    return send


def send_parameters(params: Any, send: Send) -> None:
    """Like `broadcast_parameters`, with another way to send."""
    named: list[tuple[str, torch.Tensor]] = []
    failure = None
    try:
        named = _named(params)
        _check(named)
    except (TypeError, ValueError) as error:  # raised when the other ranks know
        failure = error
    _check_same_names([name for name, _ in named], failure)
    send(named)


def _check(named: Sequence[tuple[str, Any]]) -> None:
    for name, tensor in named:
        if not isinstance(name, str):
            raise TypeError(f"broadcast_parameters: names must be strings, not {name!r}")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"broadcast_parameters: '{name}' is not a tensor but {type(tensor).__name__}; "
                "leave it out and send it with broadcast_object"
            )
        verbs.adapter.check(tensor, f"broadcast_parameters of '{name}'")
        verbs.adapter.check_writable(tensor, f"broadcast_parameters of '{name}'")
    counts = Counter(name for name, _ in named)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"broadcast_parameters: the name '{twice[0]}' occurs more than once")


def _named(params: Any) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        return sorted(params.items())
    if isinstance(params, list | tuple):
        return [
            pair if isinstance(pair, tuple) else (f"broadcast_parameters.{index}", pair)
            for index, pair in enumerate(params)
        ]
    raise ValueError(
        f"invalid params of type {type(params).__name__}: broadcast_parameters takes a state_dict, "
        "a list of (name, tensor) pairs or a list of tensors; wrap a generator in list(...)"
    )


def _check_same_names(names: list[str], failure: Exception | None) -> None:
    """Raise an error that lists the names by rank, instead of waiting for a missing tensor.

    `failure`: why this rank cannot take part; it is raised here, and the other ranks name it.
    """
    digest = -1 if failure else zlib.crc32("\n".join(names).encode("utf-8", "backslashreplace"))
    digests = verbs.allgather(torch.tensor([digest], device="cpu"), "broadcast_parameters.names")
    if failure is None and bool((digests == digest).all()):
        return
    told = allgather_object((names, failure and str(failure)), "broadcast_parameters.names")
    if failure is not None:
        raise failure
    for index, (_, text) in enumerate(told):
        if text is not None:
            raise ValueError(f"broadcast_parameters: rank {index} cannot take part: {text}")
    by_rank = [set(other) for other, _ in told]
    everywhere = set.intersection(*by_rank)
    extra = "; ".join(
        f"rank {index}: {sorted(held - everywhere)}"
        for index, held in enumerate(by_rank)
        if held != everywhere
    )
    raise ValueError(
        "broadcast_parameters: ranks hold different names. Not on every rank: "
        f"{extra or 'none, but their order differs'}. Every rank must pass the same parameters; "
        "check that the model is built identically"
    )


class _Spec(NamedTuple):
    """Stands for a tensor in the description of a state; the tensor itself is sent separately."""

    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    saved: bytes = b""  # by torch.save, if no verb takes it: sparse momentum, for example


def _plain_spec(spec: _Spec) -> list[Any]:
    if spec.saved:  # torch.load would unpickle it
        raise TypeError(f"a tensor of shape {list(spec.shape)} that needs torch.save is not plain")
    return list(spec[:4])


def _spec_of(values: Sequence[Any]) -> _Spec:
    position, shape, dtype, on_host = values
    return _Spec(position, tuple(shape), dtype, on_host)


def _dtype_of(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{text} is not a dtype")
    return found


plain.register(_Spec, "tensor", _plain_spec, _spec_of)
plain.register(torch.dtype, "dtype", str, _dtype_of)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the state and the options of rank `root_rank`'s optimizer, in place.

    No step is taken, and parameters do not change. Options (learning rate, betas, ...) are sent
    even if there is no state yet. In that case, parameters without a gradient get a zero gradient,
    as in Horovod.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Plain or distributed; of the same class with the same groups on every rank.
    model : torch.nn.Module, optional
        The optimizer's model, if some of its embeddings have sparse gradients, which are not
        made zero.

    Raises
    ------
    TypeError : for anything that is not an optimizer.
    ValueError : for LBFGS, whose state is no set of tensors per parameter; on every rank, when
        the groups differ.

    Examples
    --------
    >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    send_optimizer_state(optimizer, root_rank, model, broadcast_from(root_rank))


def send_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None, send: Send
) -> None:
    """Like `broadcast_optimizer_state`, with another way to send tensors."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            "broadcast_optimizer_state: optimizer must be a torch.optim.Optimizer, not "
            f"{type(optimizer).__name__}; pass the optimizer itself, not its state_dict()"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state; broadcast parameters only")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, Distributed):
        optimizer._before_state_is_read()
    if not optimizer.state:
        _make_zero_gradients(optimizer, parameters, model)
    description: Any = None
    tensors: list[torch.Tensor] = []
    if rank() == root_rank:
        description = _describe(optimizer, parameters, tensors)
    description = broadcast_object(description, root_rank, "broadcast_optimizer_state")
    _check_same_groups(optimizer, description, root_rank)

    if rank() != root_rank:
        tensors = _adopt(optimizer, parameters, description)
    send([(f"broadcast_optimizer_state.{index}", each) for index, each in enumerate(tensors)])
    if isinstance(optimizer, Distributed):
        optimizer._after_state_is_replaced()


def _make_zero_gradients(
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.Tensor],
    model: torch.nn.Module | None,
) -> None:
    if isinstance(optimizer, torch.optim.SparseAdam):  # takes no dense ones
        return
    modules = [] if model is None else model.modules()
    sparse = {id(each.weight) for each in modules if getattr(each, "sparse", False)}
    for param in parameters:
        if param.requires_grad and param.grad is None and id(param) not in sparse:
            param.grad = zero_gradient(param)


def _describe(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], tensors: list[torch.Tensor]
) -> dict[str, Any]:
    """Return state and options with each tensor moved to `tensors` and a _Spec in its place."""
    specs: dict[int, _Spec] = {}  # by id: shared tensors, such as a learning rate, stay shared

    def replace(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in specs:
                on_host = value.device.type == "cpu"
                spec = _Spec(len(specs), tuple(value.shape), value.dtype, on_host)
                if _can_be_written(value):
                    tensors.append(value)
                else:
                    file = io.BytesIO()
                    torch.save(value.detach(), file)
                    spec = spec._replace(saved=file.getvalue())
                specs[id(value)] = spec
            return specs[id(value)]
        return _rebuilt(value, replace)

    return {
        "class": type(optimizer).__name__,
        "sizes": [len(group["params"]) for group in optimizer.param_groups],
        "state": [replace(optimizer.state.get(p)) for p in parameters],
        "shared state": replace(_shared_state(optimizer)),
        "options": [replace(_options(group)) for group in optimizer.param_groups],
    }


def _adopt(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], description: dict[str, Any]
) -> list[torch.Tensor]:
    """Take over state and options; return the tensors that are still to be received."""
    tensors: dict[int, torch.Tensor] = {}
    received: list[torch.Tensor] = []
    taken: set[int] = set()

    def restore(value: Any, old: Any, device: torch.device) -> Any:
        if isinstance(value, _Spec):
            if value.position not in tensors:
                fits = (
                    isinstance(old, torch.Tensor)
                    and old.dtype is value.dtype
                    and tuple(old.shape) == value.shape
                    and (old.device.type == "cpu") is value.on_host
                    and id(old) not in taken
                    and _can_be_written(old)
                )
                where = torch.device("cpu") if value.on_host else device
                if value.saved:
                    new = torch.load(io.BytesIO(value.saved), where, weights_only=False)
                else:
                    new = old if fits else torch.empty(value.shape, dtype=value.dtype, device=where)
                    received.append(new)
                taken.add(id(new))
                tensors[value.position] = new
            return tensors[value.position]
        if isinstance(value, dict):
            held = old if isinstance(old, dict) else {}
            return {key: restore(item, held.get(key), device) for key, item in value.items()}
        return _rebuilt(value, lambda item: restore(item, None, device))

    for parameter, state in zip(parameters, description["state"], strict=True):
        if state is None:
            optimizer.state.pop(parameter, None)
        else:
            optimizer.state[parameter] = restore(
                state, optimizer.state.get(parameter), parameter.device
            )
    device = parameters[0].device if parameters else torch.device("cpu")
    held = _shared_state(optimizer)
    for key in held.keys() - description["shared state"].keys():
        del optimizer.state[key]
    optimizer.state.update(restore(description["shared state"], held, device))
    for group, options in zip(optimizer.param_groups, description["options"], strict=True):
        group.update(restore(options, _options(group), device))
    return received


def _can_be_written(tensor: torch.Tensor) -> bool:
    """Return whether `broadcast_` takes it."""
    try:
        verbs.adapter.check_writable(verbs.adapter.check(tensor, ""), "")
    except ValueError:
        return False
    return True


def _shared_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return the entries of the state that belong to all parameters, by name."""
    return {
        key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)
    }


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _rebuilt(value: Any, convert: Any) -> Any:
    """Return `value` with `convert` applied to the items of a dict, list or tuple."""
    if isinstance(value, dict):
        return {key: convert(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(convert(item) for item in value)
    return value


def _check_same_groups(
    optimizer: torch.optim.Optimizer, description: dict[str, Any], root_rank: int
) -> None:
    mine = (type(optimizer).__name__, [len(group["params"]) for group in optimizer.param_groups])
    roots = (description["class"], description["sizes"])
    same = verbs.allreduce(
        torch.tensor([mine == roots], device="cpu"),
        name="broadcast_optimizer_state.same",
        op=arguments.Min,
    )
    if bool(same):
        return
    by_rank = allgather_object(mine, "broadcast_optimizer_state.groups")
    values = "; ".join(
        f"rank {index}: {name} with groups of {sizes} parameters"
        for index, (name, sizes) in enumerate(by_rank)
    )
    raise ValueError(
        f"broadcast_optimizer_state: optimizers differ from that of rank {root_rank}: {values}. "
        "Build the optimizer identically on every rank"
    )


__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
