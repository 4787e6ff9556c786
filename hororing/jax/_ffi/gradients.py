"""The gradients of the verbs, like those for torch (hororing/torch/_tensor/autograd.py).

The gradient of an allreduce is reduced like it; that of a weighted one is the sum times the rank's
share. That of an allgather is averaged, and each rank takes its own rows. That of a broadcast is
averaged on the root and zero elsewhere. Rows of an alltoall go back to their senders; those of a
reducescatter are gathered.

Arguments have been checked, and arrays are as they are sent, for example compressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from hororing._engine import state
from hororing._requests.arguments import Average, Sum
from hororing._requests.handles import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST
from hororing._requests.process_sets import rank_and_size
from hororing._requests.verbs.reducescatter import rows_of
from hororing.jax._ffi.call import Call
from hororing.jax._ffi.primitive import on_host, request


def carry_out(call: Call, arrays: Sequence[Any], weight: Any = None) -> list[Any]:
    """Carry out a call; differentiable where arrays are tracers that need it.

    Also returns the received splits of an alltoall, after its rows.
    """
    if any(isinstance(each, jax.core.Tracer) for each in (*arrays, weight)):
        return list(_recorded(call, tuple(arrays), weight))
    return request(call, arrays, weight)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recorded(call: Call, arrays: tuple[Any, ...], weight: Any) -> tuple[Any, ...]:
    return tuple(request(call, arrays, weight))


def _forward(call: Call, arrays: tuple[Any, ...], weight: Any) -> tuple[Any, Any]:
    results = _recorded(call, arrays, weight)  # again differentiable
    received = results[1] if call.collective == ALLTOALL else None
    # Of the arrays only shapes are needed, without their elements.
    shapes = tuple(jnp.zeros((each.shape[0], 0)) if each.ndim else None for each in arrays)
    return results, (shapes, weight, received)


def _backward(call: Call, kept: Any, gradients: tuple[Any, ...]) -> tuple[Any, Any]:
    shapes, weight, received = kept
    smooth = [at for at in range(len(shapes)) if gradients[at].dtype != jax.dtypes.float0]
    if not smooth:
        return (None,) * len(shapes), None
    given = [gradients[at] for at in smooth]
    rows = [0 if shapes[at] is None else shapes[at].shape[0] for at in smooth]
    results = _gradients(call, given, rows, weight, received)
    found = dict(zip(smooth, results, strict=True))
    return tuple(found.get(at) for at in range(len(shapes))), None


_recorded.defvjp(_forward, _backward)


def _gradients(
    call: Call, gradients: list[Any], rows: list[int], weight: Any, received: Any
) -> list[Any]:
    if call.collective == ALLREDUCE:
        return _of_allreduce(call, gradients, weight)
    if call.collective == BROADCAST:
        averaged = carry_out(call.backward(collective=ALLREDUCE, op=Average), gradients)
        # Depends on them everywhere, or JAX would drop the request on other ranks than the root.
        is_root = jnp.asarray(state.rank() == call.root)
        return [jnp.where(is_root, each, jnp.zeros_like(each)) for each in averaged]
    if call.collective == ALLGATHER:
        whole = carry_out(call.backward(collective=ALLREDUCE, op=Average), gradients)
        begins = _begins(call, whole, rows)
        return [
            each[begin : begin + count]
            for each, begin, count in zip(whole, begins, rows, strict=True)
        ]
    if call.collective == ALLTOALL:
        return _of_alltoall(call, gradients, rows, received)
    factor = call.factors[0] * call.factors[1]  # of a reducescatter
    if call.op == Sum:
        factor *= rank_and_size(call.process_set)[1]
    mine = [each * jnp.asarray(factor, each.dtype) for each in gradients]
    back = call.backward(collective=ALLGATHER, factors=(1.0, 1.0))
    return carry_out(back._replace(rows=tuple(rows)), mine)


def _of_allreduce(call: Call, gradients: list[Any], weight: Any) -> list[Any]:
    if weight is None and call.weight is None:
        return carry_out(call.backward(), gradients)
    mine = jnp.asarray(call.weight) if weight is None else weight
    whole = call.backward(op=Sum, factors=(1.0, 1.0))
    total, *_ = carry_out(whole._replace(verb=f"{whole.verb}.weight", name=_weight_name(whole)),
                          [mine])  # fmt: skip
    share = jnp.where(total > 0, mine / jnp.where(total > 0, total, 1), 0)
    sums = carry_out(whole._replace(factors=call.factors), gradients)
    return [each * share.astype(each.dtype) for each in sums]


def _weight_name(call: Call) -> str | None:
    return None if call.name is None else f"{call.name}.weight"


def _begins(call: Call, whole: Sequence[Any], rows: list[int]) -> list[int]:
    """Where this rank's rows begin. Numbers of rows differ only outside of compiled programs."""
    rank, size = rank_and_size(call.process_set)
    if call.rows is not None:
        return [sum(rows_of(total, size, each) for each in range(rank)) for total in call.rows]
    if any(isinstance(each, jax.core.Tracer) for each in whole):
        return [rank * count for count in rows]
    counts = call.backward(collective=ALLGATHER)._replace(
        verb=f"{call.verb}.rows", name=None if call.name is None else f"{call.name}.rows"
    )
    (of_all,) = on_host(counts, [np.array([rows], np.int64)], None)
    return [int(count) for count in of_all[:rank].sum(0)]


def _of_alltoall(call: Call, gradients: list[Any], rows: list[int], received: Any) -> list[Any]:
    back = call.backward(splits=None)
    if not isinstance(gradients[0], jax.core.Tracer):
        back = back._replace(splits=tuple(np.asarray(received).tolist()))
    returned = carry_out(back, gradients)[0]
    not_sent = rows[0] - returned.shape[0]
    return [jnp.pad(returned, [(0, not_sent)] + [(0, 0)] * (returned.ndim - 1))]
