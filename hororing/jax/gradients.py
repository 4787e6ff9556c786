"""Reduces the gradients of a step: a pytree, in a few requests that begin as soon as they can."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax

from hororing._adapters.optimizer_options import Reduction, checked_reduction
from hororing._requests.arguments import Average
from hororing._requests.compression import Compressor, NoneCompressor
from hororing._requests.handles import ALLREDUCE
from hororing._requests.process_sets import ProcessSet, global_process_set
from hororing.jax._ffi import arrays
from hororing.jax._ffi.call import Call
from hororing.jax.verbs import reduce_leaves

# Gradients are reduced in groups of about so many bytes: small layers together, and large ones
# while the rest is still being computed. PyTorch's DistributedDataParallel has 25 MiB.
_GROUP_BYTES: Final = 8 << 20

members: Final[dict[str, list[str]]] = {}  # the gradients of each request, by its name


def reduce_gradients(gradients: Any, prefix: str, settings: Reduction, weight: Any = None) -> Any:
    """Return the reduced gradients, a pytree. Names consist of `prefix` and the path of a leaf."""
    if not settings.reduces:
        return gradients
    paths, structure = jax.tree_util.tree_flatten_with_path(gradients)
    leaves = [arrays.checked(leaf, prefix) for _, leaf in paths]
    keys = [jax.tree_util.keystr(path) for path, _ in paths]
    names = [f"{prefix}{key}" for key in keys]
    parts = _parts(leaves, keys, settings.groups)
    results = reduce_parts(leaves, names, parts, prefix, settings, weight)
    return jax.tree_util.tree_unflatten(structure, results)


def reduce_parts(
    leaves: Sequence[Any],
    names: Sequence[str],
    parts: Sequence[Sequence[int]],
    site: str,
    settings: Reduction,
    weight: Any = None,
) -> list[Any]:
    """Return the reduced leaves; each of `parts`, places of leaves, is one request."""
    results = list(leaves)
    for part in parts:
        more = f"+{len(part) - 1}" if len(part) > 1 else ""
        members[names[min(part)] + more] = [names[at] for at in part]
        call = Call(
            ALLREDUCE, "allreduce", names[min(part)] + more, site, settings.process_set,
            op=settings.op,
        )  # fmt: skip
        given = [leaves[at] for at in part]
        reduced = reduce_leaves(call, given, settings.compression, settings.factors, weight)
        for at, result in zip(part, reduced, strict=True):
            results[at] = result
    return results


def check_groups(what: str, groups: Any) -> None:
    """Raise TypeError for lists of something else than paths."""
    for member in itertools.chain(*groups) if isinstance(groups, list | tuple) else ():
        if not isinstance(member, str):
            raise TypeError(
                f"{what}: groups must be a number, or lists of paths such as \"['dense']\", "
                f"not of {type(member).__name__}: arrays of JAX have no identity"
            )


def _parts(leaves: Sequence[Any], keys: Sequence[str], wanted: Any) -> list[list[int]]:
    """Return places of leaves that are reduced together; `keys` are the paths of the leaves."""
    count = len(leaves)
    if isinstance(wanted, int):
        parts = min(wanted, count)
        if not parts:
            return in_groups(leaves, range(count))
        return [list(range(count * at // parts, count * (at + 1) // parts)) for at in range(parts)]
    group_of: dict[int, int] = {}
    for number, members in enumerate(wanted):
        for member in members:
            found = [at for at, key in enumerate(keys) if _is_below(key, member)]
            if not found:
                raise ValueError(
                    f"groups[{number}]: no gradient is at {member!r}; they are at {', '.join(keys)}"
                )
            if twice := [keys[at] for at in found if at in group_of]:
                raise ValueError(f"groups[{number}]: {twice[0]} occurs in groups twice")
            group_of.update(dict.fromkeys(found, number))
    named = [[at for at in group_of if group_of[at] == number] for number in range(len(wanted))]
    return named + in_groups(leaves, [at for at in range(count) if at not in group_of])


def _is_below(key: str, subtree: str) -> bool:
    """Whether the leaf at `key` is `subtree` or a part of it."""
    return key == subtree or (key.startswith(subtree) and key[len(subtree)] in "[.")


def in_groups(leaves: Sequence[Any], places: Sequence[int]) -> list[list[int]]:
    """Return `places` in groups of about _GROUP_BYTES."""
    groups: list[list[int]] = []
    room = 0
    for at in reversed(places):  # the last layers have their gradients first
        bytes_ = leaves[at].size * leaves[at].dtype.itemsize
        if not groups or bytes_ > room:
            groups.append([])
            room = _GROUP_BYTES
        groups[-1].append(at)
        room -= bytes_
    return groups


def DistributedGrad(
    function: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    name: str | None = None,
    op: int = Average,
    compression: type[Compressor] = NoneCompressor,
    gradient_predivide_factor: float = 1.0,
    groups: int | Sequence[Sequence[str]] | None = None,
    process_set: ProcessSet = global_process_set,
    weight: Any = None,
) -> Callable[..., Any]:
    """Like `jax.grad`, with gradients that are reduced over the ranks.

    Parameters
    ----------
    function, argnums, has_aux
        As for `jax.grad`.
    name : str, optional
        Prefix of the names of the requests; the name of `function` when omitted.
    op, compression, gradient_predivide_factor, groups, process_set
        As for `DistributedOptimizer`.
    weight : float or jax.Array, optional
        This rank's weight in an average, such as its number of samples; see `allreduce`.

    Returns
    -------
    callable
        Returns the gradients, and the auxiliary value of this rank.

    Examples
    --------
    >>> hvd.DistributedGrad(lambda x: (x**2).sum())(jnp.ones(3)).tolist()
    [2.0, 2.0, 2.0]
    """
    both = value_and_grad(
        function, argnums, has_aux, name=name, op=op, compression=compression,
        gradient_predivide_factor=gradient_predivide_factor, groups=groups,
        process_set=process_set, weight=weight,
    )  # fmt: skip

    @functools.wraps(function)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient


def value_and_grad(
    function: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    name: str | None = None,
    op: int = Average,
    compression: type[Compressor] = NoneCompressor,
    gradient_predivide_factor: float = 1.0,
    groups: int | Sequence[Sequence[str]] | None = None,
    process_set: ProcessSet = global_process_set,
    weight: Any = None,
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`, with gradients that are reduced over the ranks.

    The value is that of this rank; see `metric_average`. Arguments as for `DistributedGrad`.

    >>> loss, gradients = hvd.value_and_grad(lambda x: (x**2).sum())(jnp.ones(3))
    """
    check_groups("value_and_grad", groups)
    settings = checked_reduction(
        "value_and_grad", op=op, compression=compression, groups=groups,
        gradient_predivide_factor=gradient_predivide_factor, process_set=process_set,
    )  # fmt: skip
    prefix = getattr(function, "__name__", "function") if name is None else name
    both = jax.value_and_grad(function, argnums, has_aux)

    @functools.wraps(function)
    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return value, reduce_gradients(gradients, f"{prefix}.grad", settings, weight)

    return value_and_gradient


__all__ = ["DistributedGrad", "value_and_grad"]
