"""A request as a primitive of JAX.

Eager, it goes through host memory to the core and returns when it is complete. In a compiled
program it is a custom call (csrc/jax), which XLA runs when its arrays are ready; only what needs
its results waits for it. XLA keeps it even if nothing does; JAX drops it if no result of the
traced function depends on it. To JAX it has no effects, so that loops, branches, `remat` and so on
take it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from hororing._engine.core import lib
from hororing._requests import handles
from hororing._requests.arguments import Adasum, Sum
from hororing._requests.handles import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST, REDUCESCATTER
from hororing._requests.names import naming
from hororing._requests.process_sets import check_member, rank_and_size
from hororing._requests.verbs.reducescatter import rows_of
from hororing.jax._ffi.call import Call
from hororing.jax._ffi.lowered import note_request
from hororing.jax._ffi.plugin import TARGET
from hororing.jax._ffi.program import program_of

BARRIER: Final = int(lib.HR_BARRIER)

_request: Final = Primitive("hororing_request")
_request.multiple_results = True


def request(call: Call, arrays: Sequence[Any], weight: Any = None) -> list[Any]:
    """Carry it out, or add it to the program that is being traced.

    `weight` is an array without dimensions, or None. An alltoall also returns how many rows came
    from each rank. Not differentiable.
    """
    operands = [*arrays, *(() if weight is None else (weight,))]
    results = list(_request.bind(*operands, call=call, weighted=weight is not None))
    if call.collective == ALLTOALL and len(results) == 1:  # it was traced
        _, size = rank_and_size(call.process_set)
        results.append(jax.numpy.full(size, results[0].shape[0] // size, np.int32))
    return results


# Eager.


def _eagerly(*operands: Any, call: Call, weighted: bool) -> list[Any]:
    arrays = operands[: len(operands) - weighted]
    weight = float(operands[-1]) if weighted else call.weight
    results = on_host(call, [np.asarray(each) for each in arrays], weight)
    if not arrays or not isinstance(arrays[0], jax.Array):
        return [jax.numpy.asarray(each) for each in results]
    (device,) = arrays[0].devices()
    return [jax.device_put(each, device) for each in results]


def on_host(
    call: Call, arrays: Sequence[np.ndarray[Any, Any]], weight: float | None
) -> list[np.ndarray[Any, Any]]:
    """Carry out a call for arrays in host memory; also the received splits of an alltoall."""
    members = check_member(call.process_set, call.verb)
    if call.collective == BARRIER:
        with naming(call.name, call.verb, members) as name:
            handle = handles.submit(
                BARRIER, name, (), keep=None, finish=lambda _: None, process_set=members,
                blocking=True,
            )  # fmt: skip
        handles.wait(handle)
        return list(arrays)
    inputs = [np.asarray(each, order="C") for each in arrays]
    outputs = _outputs(call, inputs)
    views = [
        handles.View(
            _address(array), 0 if output is None else _address(output),
            handles.DTYPES[array.dtype.name], array.shape,
        )
        for array, output in zip(inputs, outputs, strict=True)
    ]  # fmt: skip
    with naming(call.name, call.verb, members) as name:
        handle = handles.submit(
            call.collective, name, views, keep=(inputs, outputs),
            finish=partial(_finish, call, inputs, outputs), process_set=members, op=call.op,
            root=call.root, prescale=call.factors[0], postscale=call.factors[1],
            integers=call.splits, blocking=True, weight=weight,
        )  # fmt: skip
    return list(handles.wait(handle))


def _outputs(call: Call, inputs: Sequence[np.ndarray[Any, Any]]) -> list[Any]:
    if call.collective in (ALLGATHER, ALLTOALL):
        return [None] * len(inputs)  # the core allocates
    if call.collective == REDUCESCATTER:
        rank, size = rank_and_size(call.process_set)
        return [
            np.empty((rows_of(len(each), size, rank), *each.shape[1:]), each.dtype)
            for each in inputs
        ]
    return [np.empty(each.shape, each.dtype) for each in inputs]


def _finish(call: Call, inputs: Sequence[Any], outputs: Sequence[Any], handle: int) -> list[Any]:
    results = [
        _gathered(handles.take(handle, at), array) if output is None else output
        for at, (array, output) in enumerate(zip(inputs, outputs, strict=True))
    ]
    if call.collective == ALLTOALL:
        results.append(np.array(handles.take_numbers(handle, 1), np.int32))
    return results


def _gathered(result: handles.Gathered, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shape = (result.rows, *like.shape[1:])
    if result.buffer is None:
        return np.empty(shape, like.dtype)
    return np.frombuffer(result.buffer, like.dtype).reshape(shape)


def _address(array: np.ndarray[Any, Any]) -> int:
    return array.ctypes.data if array.size else 0


_request.def_impl(_eagerly)


# In compiled programs.


def _shapes(*operands: Any, call: Call, weighted: bool) -> list[Any]:
    arrays = operands[: len(operands) - weighted]
    rank, size = rank_and_size(call.process_set)
    return [_result(call, at, each, rank, size) for at, each in enumerate(arrays)]


def _result(call: Call, at: int, array: Any, rank: int, size: int) -> Any:
    if call.collective not in (ALLGATHER, ALLTOALL, REDUCESCATTER):
        return array.update(weak_type=False)
    rows = array.shape[0]
    if call.collective == ALLGATHER:
        rows = rows * size if call.rows is None else call.rows[at]
    elif call.collective == REDUCESCATTER:
        rows = rows_of(rows, size, rank)
    elif rows % size or (call.splits is not None and {*call.splits} != {rows // size}):
        raise ValueError(
            f"{call.verb}: in a compiled program every rank sends equally many rows to each, and "
            f"{rows} rows with splits={call.splits} for {size} ranks are not; call it outside of "
            "jax.jit"
        )
    return array.update(shape=(rows, *array.shape[1:]), weak_type=False)


_request.def_abstract_eval(_shapes)


def _lower_on_gpu(ctx: Any, *operands: Any, call: Call, weighted: bool) -> Any:
    """Barriers are sums: they must wait for what the GPU has still to compute."""
    if weighted:
        raise NotImplementedError(
            f"{call.verb}: in a function that is compiled for GPUs, a weight must be a number; or "
            "divide the sum of the arrays times their weights by the sum of the weights"
        )
    if call.collective == BARRIER:
        call = call._replace(collective=ALLREDUCE, op=Sum)
    return _lower(ctx, *operands, call=call, weighted=weighted)


def _lower(ctx: Any, *operands: Any, call: Call, weighted: bool) -> Any:
    _check_devices(ctx.module_context.axis_context, call)
    note_request(ctx.module_context, call.verb)
    name = program_of(ctx.module_context).name_of(call)
    alike = call.collective in (ALLREDUCE, BROADCAST, BARRIER)
    lower = jax.ffi.ffi_lowering(
        TARGET,
        has_side_effect=True,
        # In place, except for the program's arguments, which XLA would have to copy.
        operand_output_aliases={
            at: at for at in range(len(ctx.avals_out)) if alike and not _is_argument(operands[at])
        },
    )
    return lower(
        ctx,
        *operands,
        name=name,
        # struct Given of csrc/jax/collective.cc
        integers=np.array(
            [
                call.collective, check_member(call.process_set, call.verb), call.op, call.root,
                1 if weighted else 0 if call.weight is None else 2,
            ],
            np.int64,
        ),
        numbers=np.array([*call.factors, call.weight or 0.0], np.float64),
    )  # fmt: skip


def _is_argument(value: Any) -> bool:
    """Whether an operand is an argument of the whole program."""
    block = value.owner
    if not hasattr(block, "arguments"):  # an operation, or a block of a function
        return False
    attributes = block.owner.operation.attributes
    return "sym_name" in attributes and str(attributes["sym_name"]) == '"main"'


def _check_devices(axes: Any, call: Call) -> None:
    """Refuse programs on several devices: which of them would speak for this rank?"""
    devices = getattr(axes, "num_devices", None)  # of jit, or of shard_map, or of pmap
    if devices is None:
        devices = axes.mesh.size if hasattr(axes, "mesh") else axes.axis_env.nreps
    if devices > 1:
        raise ValueError(
            f"{call.verb}: the program runs on {devices} devices, and a rank has one; start one "
            "rank for each device, for example with hororun -np "
            f"{devices}, and keep arrays on one device"
        )


# Not cached: each occurrence has a name of its own. JAX 0.5 does not cache, nor know the option.
_options = inspect.signature(mlir.register_lowering).parameters
_own: Final = {"cacheable": False} if "cacheable" in _options else {}
mlir.register_lowering(_request, _lower, platform="cpu", **_own)
mlir.register_lowering(_request, _lower_on_gpu, platform="cuda", **_own)


def _refuse(ctx: Any, *operands: Any, call: Call, weighted: bool) -> Any:
    raise NotImplementedError(
        f"{call.verb}: compiled functions that communicate run on CPUs and on GPUs of NVIDIA; call "
        "it outside of jax.jit, or compile for jax.devices('cpu')[0] with jax.default_device"
    )


mlir.register_lowering(_request, _refuse)  # on other platforms


def _batched(operands: Any, dims: Any, *, call: Call, weighted: bool) -> Any:
    """Communicate whole batches; ranks have equally large ones."""
    if call.op == Adasum and call.collective == ALLREDUCE:
        raise NotImplementedError(
            f"{call.verb}: op=Adasum depends on all elements together, so it cannot be used in "
            "jax.vmap; use op=Average, or jax.lax.map"
        )
    if weighted and dims[-1] is not None:
        raise NotImplementedError(
            f"{call.verb}: in jax.vmap a weight must not be mapped; scale the tensors instead"
        )
    if call.collective in (ALLGATHER, ALLTOALL, REDUCESCATTER):  # the first dimension has the rows
        operands = [
            x if at is None else jax.numpy.moveaxis(x, at, 1)
            for x, at in zip(operands, dims, strict=True)
        ]
        dims = [None if at is None else 1 for at in dims]
    results = _request.bind(*operands, call=call, weighted=weighted)
    out_dims = list(dims[: len(dims) - weighted])
    out_dims += [None] * (len(results) - len(out_dims))  # received splits
    return results, out_dims


batching.primitive_batchers[_request] = _batched
