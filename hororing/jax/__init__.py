"""hororing for JAX::

    import hororing.jax as hvd

    hvd.init()
    tx = hvd.DistributedOptimizer(optax.adamw(1e-3 * hvd.size()))
    params = hvd.broadcast_parameters(params, root_rank=0)

    @jax.jit
    def step(params, opt_state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, hvd.metric_average(loss)

All names and recipes: docs/jax.md.
"""

from __future__ import annotations

from hororing._api import exports
from hororing._api.exports import *  # noqa: F403
from hororing._requests.objects import allgather_object, broadcast_object
from hororing._requests.verbs import join
from hororing.jax import elastic, errors, functions, gradients, verbs
from hororing.jax.compression import Compression
from hororing.jax.errors import *  # noqa: F403
from hororing.jax.functions import *  # noqa: F403
from hororing.jax.gradients import *  # noqa: F403
from hororing.jax.guard import guard
from hororing.jax.optimizer import DistributedOptimizer
from hororing.jax.verbs import *  # noqa: F403

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "allgather_object",
    "broadcast_object",
    "elastic",
    "guard",
    "join",
]
__all__ += errors.__all__
__all__ += exports.__all__
__all__ += functions.__all__
__all__ += gradients.__all__
__all__ += verbs.__all__
