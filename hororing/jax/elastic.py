"""Elastic training with JAX::

    import hororing.jax as hvd

    hvd.init()
    state = hvd.elastic.JaxState(params=params, opt_state=opt_state, epoch=0)

    @hvd.elastic.run
    def train(state):
        while state.epoch < 10:
            ...
            state.epoch += 1
            state.commit()

    train(state)

Start it with hororun --min-np. See docs/elastic.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from hororing import elastic
from hororing._engine import state as engine_state
from hororing._requests.objects import broadcast_object
from hororing.elastic import *  # noqa: F403
from hororing.elastic import ObjectState, run_fn
from hororing.elastic.loop import reset
from hororing.jax.errors import convert_error
from hororing.jax.functions import broadcast_parameters


def run(func: Callable[..., Any]) -> Callable[..., Any]:  # type: ignore[no-redef]
    """Like `hororing.elastic.run`, also for the errors that compiled functions raise.

    Functions are compiled again after a change of members: they hold numbers of ranks.
    """
    return run_fn(func, reset, lambda error: convert_error(error) or _own(error))


def _own(error: Exception) -> Exception | None:
    """Return an error that eager calls have raised; None for one of JAX alone."""
    return None if isinstance(error, jax.errors.JaxRuntimeError) else error


class JaxState(ObjectState):
    """A state of pytrees and plain objects, as attributes.

    >>> state = JaxState(params={"kernel": jnp.ones((3, 2))}, epoch=0)

    Parameters
    ----------
    kwargs : dict
        The values by name: parameters, the state of an optimizer, keys, counters. A commit copies
        them, so a compiled function may own (donate) what they hold.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(bcast_object=_sent, get_rank=engine_state.rank, **kwargs)

    def save(self) -> None:
        """Wait for the values, and copy them. An error of their computation leaves the old ones."""
        jax.block_until_ready([getattr(self, name) for name in self._saved_state])
        super().save()


def _sent(value: Any) -> Any:
    """Return, on all ranks, what rank 0 passes: arrays as arrays, other values pickled."""
    if not isinstance(value, dict):
        return broadcast_object(value)
    return {
        name: broadcast_parameters(each) if _has_arrays_alone(each) else broadcast_object(each)
        for name, each in value.items()
    }


def _has_arrays_alone(value: Any) -> bool:
    leaves = jax.tree_util.tree_leaves(value)
    return bool(leaves) and all(isinstance(leaf, jax.Array) for leaf in leaves)


__all__ = ["JaxState"]
__all__ += elastic.__all__
