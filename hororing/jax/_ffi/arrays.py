"""Checks the arrays of verbs, and takes pytrees apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax import numpy as jnp

from hororing._requests import arguments, handles
from hororing.jax._ffi.call import Call

# What holds the numbers of types that the core does not reduce, or does not take; else bfloat16.
_CASTS: Final = {"uint32": "jnp.int64", "uint64": "jnp.int64", "int2": "jnp.int8",
                 "int4": "jnp.int8", "uint2": "jnp.uint8", "uint4": "jnp.uint8"}  # fmt: skip
_IN_PARTS: Final = ("complex64", "complex128")
_LACKING: Final = ("int4", "uint4", "float4_e2m1fn_x2")  # XLA may pack them differently


def flattened(tree: Any, verb: str) -> tuple[list[Any], Any]:
    """Return the checked leaves and the structure of a pytree of arrays, at least one."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    if not leaves:
        raise ValueError(f"{verb}: there are no arrays in {tree!r}; pass at least one")
    return [checked(leaf, verb) for leaf in leaves], structure


def checked(array: Any, verb: str) -> Any:
    """Return the argument as an array of JAX that the core can take."""
    if isinstance(array, str | bytes) or array is None:
        raise TypeError(f"{verb} takes arrays, not {type(array).__name__}")
    if not isinstance(array, jax.Array):
        if type(array).__module__.partition(".")[0] in ("torch", "tensorflow"):
            raise TypeError(
                f"{verb} of hororing.jax takes arrays of JAX, not {type(array).__module__}."
                f"{type(array).__name__}; use jax.numpy.asarray"
            )
        try:
            array = jnp.asarray(array)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{verb} takes arrays, not {array!r}: {error}") from None
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise ValueError(f"{verb}: keys have no numbers; use jax.random.key_data(keys)")
    name = array.dtype.name
    if name not in _IN_PARTS and (name not in handles.DTYPES or name in _LACKING):
        raise ValueError(
            f"{verb}: arrays of {name} are not supported; cast it, for example by "
            f"array.astype({_CASTS.get(name, 'jnp.bfloat16')})"
        )
    if not isinstance(array, jax.core.Tracer) and len(array.devices()) > 1:
        raise ValueError(
            f"{verb}: the array is on {len(array.devices())} devices, and a rank has one; start "
            "one rank for each device, or use jax.device_put(array, jax.local_devices()[0])"
        )
    return array


def check_reducible(arrays: Sequence[Any], verb: str) -> None:
    """Raise ValueError for types without arithmetic in the core."""
    for array in arrays:
        name = array.dtype.name
        if name not in handles.REDUCED and name not in _IN_PARTS:
            raise ValueError(
                f"{verb}: arrays of {name} cannot be reduced; cast it, for example by "
                f"array.astype({_CASTS.get(name, 'jnp.bfloat16')})"
            )


def check_rows(arrays: Sequence[Any], call: Call, instead: str) -> None:
    """Raise ValueError for arrays without dimensions."""
    if any(array.ndim == 0 for array in arrays):
        named = "" if call.name is None else f" '{call.name}'"
        raise ValueError(f"{call.verb}{named}: an array without dimensions has no rows; {instead}")


def checked_weight(weight: Any, verb: str) -> tuple[float | None, Any]:
    """Return a weight as a number, or else as an array; which values are right, the core checks."""
    if not isinstance(weight, jax.Array):
        return arguments.check_weight(weight, verb), None
    if weight.size != 1:
        raise ValueError(f"{verb}: weight must be a number, not an array of shape {weight.shape}")
    wide = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
    return None, weight.reshape(()).astype(wide)


def in_parts(carry_out: Callable[[list[Any]], Sequence[Any]], arrays: Sequence[Any]) -> list[Any]:
    """Call `carry_out` with complex numbers as pairs; further results are left alone."""
    types = [array.dtype for array in arrays]
    complexes = [jnp.issubdtype(each, jnp.complexfloating) for each in types]
    results = list(
        carry_out(
            [
                jnp.stack([array.real, array.imag], -1) if pairs else array
                for array, pairs in zip(arrays, complexes, strict=True)
            ]
        )
    )
    for at, pairs in enumerate(complexes):
        if pairs:
            results[at] = jax.lax.complex(results[at][..., 0], results[at][..., 1])
    return results


def is_traced() -> bool:
    """Whether a function is being traced, for example by jax.jit."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def static_splits(splits: Any) -> tuple[int, ...] | None:
    """Return the splits of an alltoall."""
    if splits is None:
        return None
    if isinstance(splits, jax.core.Tracer):
        raise ValueError(
            "alltoall: splits must be known while a function is traced, and not depend on its "
            "arguments; call it outside of jax.jit, or leave splits out"
        )
    if isinstance(splits, jax.Array | np.ndarray):
        array = np.asarray(splits)
        return tuple(arguments.check_splits(array.tolist(), array.ndim, array.dtype.name))
    return tuple(arguments.check_splits(splits))
