"""Compare compiled functions of hororing.jax on GPUs with eager calls, which go through the host.

    hororun -np 2 python benchmarks/jax_gpu_check.py

Ranks use the GPUs of their host in turn.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # ranks may share a GPU

import jax
import numpy as np
from jax import numpy as jnp

import hororing.jax as hvd

VERBS = {
    "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum),
    "tree": lambda x: hvd.allreduce({"x": x, "one": x[0, 0]}),
    "broadcast": lambda x: hvd.broadcast(x, hvd.size() - 1),
    "allgather": hvd.allgather,
    "alltoall": hvd.alltoall,
    "reducescatter": hvd.reducescatter,
    "barrier": lambda x: hvd.barrier(x + 1),
}


def main() -> None:
    """Check each verb on small and large arrays. AssertionError for one that is wrong."""
    hvd.init()
    devices = jax.devices("gpu")
    with jax.default_device(devices[hvd.local_rank() % len(devices)]):
        for rows in (2, 1 << 12):
            whole = np.arange(rows * hvd.size() * 256) % 97
            x = jnp.asarray(whole.reshape(-1, 256) + hvd.rank(), jnp.float32)
            for name, verb in VERBS.items():
                found, wanted = jax.jit(verb)(jnp.sin(x * 0) + x), verb(x)
                for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
                    assert (np.asarray(one) == np.asarray(other)).all(), (name, rows)
    if hvd.rank() == 0:
        print(f"jax {jax.__version__}: {len(VERBS)} verbs are right on {hvd.size()} ranks")


if __name__ == "__main__":
    main()
