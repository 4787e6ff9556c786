"""hororing.jax against hororing.torch, whose bits it has, and jax.distributed, whose losses."""

from __future__ import annotations

import mpirun
import pytest
import tiers

BITS = """
import os, sys
os.environ.update(JAX_ENABLE_X64="1", JAX_PLATFORMS="cpu")
import jax, ml_dtypes, numpy as np, torch
from jax import numpy as jnp
import hororing.jax as hvd, hororing.torch as of_torch

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
verbs = [
    *((f"sum, average of {n}", lambda m, x, op=op: m.allreduce(x, op=op)) for n, op in
      (("Sum", hvd.Sum), ("Average", hvd.Average), ("Min", hvd.Min), ("Product", hvd.Product))),
    ("factors", lambda m, x: m.allreduce(x, prescale_factor=0.3, postscale_factor=1.7)),
    ("weight", lambda m, x: m.allreduce(x, weight=RANK + 0.3)),
    ("fp16", lambda m, x: m.allreduce(x, compression=m.Compression.fp16)),
    ("bf16", lambda m, x: m.allreduce(x, compression=m.Compression.bf16)),
    ("scatter", lambda m, x: m.reducescatter(x)),
    ("gather", lambda m, x: m.allgather(x)),
    ("broadcast", lambda m, x: m.broadcast(x, SIZE - 1)),
    ("group", lambda m, x: m.grouped_allreduce([x, x[:2]])[0]),
]
for dtype in ("float32", "float64", "float16", "bfloat16", "int32", "uint8"):
    for count in (1 + SIZE, 999, 70_001):
        rng = np.random.default_rng([RANK, count])
        made = rng.normal(0, 3, count) if "float" in dtype else rng.integers(0, 50, count)
        mine = made.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        as_bytes = mine.view(np.int16) if dtype == "bfloat16" else mine
        theirs = torch.from_numpy(as_bytes.copy())
        theirs = theirs.view(torch.bfloat16) if dtype == "bfloat16" else theirs
        for name, verb in verbs:
            if "float" not in dtype and name in ("factors", "weight"):
                continue
            if dtype != "float32" and name in ("fp16", "bf16"):
                continue  # XLA rounds float64 twice, by way of float32
            of_t = verb(of_torch, theirs).contiguous().view(torch.uint8).numpy().tobytes()
            for way in (lambda x: verb(hvd, x), jax.jit(lambda x: verb(hvd, x))):
                found = np.asarray(way(jnp.asarray(mine))).tobytes()
                assert found == of_t, (dtype, count, name)
print("bits are equal")
"""

LOSSES = """
import os, socket
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import hororing.jax as hvd

hvd.init()
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = hvd.broadcast_object(free.getsockname()[1])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", hvd.size(), hvd.rank())
import jax_transformer as model

mesh = Mesh(np.array(jax.devices()), ("ranks",))
whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("ranks",)))
part = slice(hvd.rank(), None, hvd.size())
theirs = model.losses(
    optax.adam(1e-2),
    lambda tokens: jax.make_array_from_process_local_data(split, tokens[part]),
    place=lambda x: jax.make_array_from_process_local_data(whole, np.asarray(x)),
)
with jax.default_device(jax.local_devices()[0]):
    ours = model.losses(
        hvd.DistributedOptimizer(optax.adam(1e-2)), lambda tokens: tokens[part],
        hvd.metric_average, lambda x: jax.device_put(x, jax.local_devices()[0]),
    )
np.testing.assert_allclose(ours, theirs, rtol=1e-5)
assert np.mean(ours[-5:]) < np.mean(ours[:5])
print("losses are equal")
hvd.barrier()
"""


@tiers.full
@pytest.mark.parametrize(
    ("script", "size", "says"),
    [(BITS, 2, "bits are equal"), (BITS, 3, "bits are equal"), (LOSSES, 2, "losses are equal")],
    ids=["bits of torch, 2", "bits of torch, 3", "losses of jax.distributed"],
)
def test_peers(script: str, size: int, says: str, tmp_path) -> None:
    pytest.importorskip("optax")
    pytest.importorskip("torch")
    path = tmp_path / "peers.py"
    path.write_text(script)
    job = mpirun.run(path, size)
    assert job.returncode == 0, job.report()
    assert all(says in output for output in job.outputs), job.report()
