"""Compare hororing.jax with XLA's own collectives and with callbacks, in compiled functions.

    hororun -np 2 python benchmarks/jax_peers.py

Every measurement is interleaved: one call of each in turn, in the same processes, and the median of
each is printed, with its ratio to that of gloo. A step is the gradient of a network with 200
layers, small ones, and its update.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax import numpy as jnp
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hororing.jax as hvd
import hororing.numpy as hvd_numpy

LAYERS, WIDTH = 200, 32


def initialize() -> Mesh:
    """Start both: XLA's processes meet at a port that rank 0 has found free."""
    import socket

    hvd.init()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = hvd.broadcast_object(free.getsockname()[1])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", hvd.size(), hvd.rank())
    return Mesh(np.array(jax.devices()), ("ranks",))


def callback(x: jax.Array) -> jax.Array:
    """Average over the ranks as hororing.keras did before there was hororing.jax."""
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return io_callback(lambda each: hvd_numpy.allreduce(np.asarray(each)), like, x, ordered=True)


def sums(mesh: Mesh, size: int) -> dict:
    """Return a function and its argument by name."""
    here = jax.local_devices()[0]
    one = jax.device_put(np.ones(size, np.float32), here)
    whole = jax.make_array_from_process_local_data(
        NamedSharding(mesh, PartitionSpec("ranks")), np.ones(size, np.float32)
    )
    spec = PartitionSpec("ranks")
    psum = jax.shard_map(lambda x: jax.lax.psum(x, "ranks"), mesh=mesh, in_specs=spec,
                         out_specs=PartitionSpec())  # fmt: skip
    return {
        "gloo": (jax.jit(psum), whole),
        "hororing": (jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum)), one),
        "callbacks": (jax.jit(callback), one),
    }


def steps(mesh: Mesh) -> dict:
    """Return the step of a deep network, by name."""
    here = jax.local_devices()[0]
    weights = [np.eye(WIDTH, dtype=np.float32) for _ in range(LAYERS)]
    x = np.ones((16, WIDTH), np.float32)

    def loss_of(weights: list, x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return (x**2).mean()

    def step(reduce):
        def run(given):
            weights, x = given
            gradients = reduce(jax.grad(loss_of)(weights, x))
            return [w - 0.01 * g for w, g in zip(weights, gradients, strict=True)]

        return run

    def by_hororing(given):
        weights, x = given
        gradients = hvd.DistributedGrad(loss_of)(weights, x)
        return [w - 0.01 * g for w, g in zip(weights, gradients, strict=True)]

    local = jax.device_put((weights, x), here)
    replicated, split = PartitionSpec(), PartitionSpec("ranks")
    everywhere = [
        jax.make_array_from_process_local_data(NamedSharding(mesh, replicated), w) for w in weights
    ]
    shared = jax.make_array_from_process_local_data(NamedSharding(mesh, split), x)

    def psum_all(gradients):
        return [jax.lax.pmean(g, "ranks") for g in gradients]

    by_gloo = jax.shard_map(step(psum_all), mesh=mesh, in_specs=((replicated, split),),
                            out_specs=replicated, check_vma=False)  # fmt: skip
    return {
        "alone": (jax.jit(step(lambda gradients: gradients)), local),
        "gloo": (jax.jit(by_gloo), (everywhere, shared)),
        "hororing": (jax.jit(by_hororing), local),
        "callbacks": (jax.jit(step(lambda gradients: list(map(callback, gradients)))), local),
    }


def measure(what: str, functions: dict, runs: int) -> None:
    for function, argument in functions.values():
        jax.block_until_ready(function(argument))  # compiles
    times: dict = {name: [] for name in functions}
    for _ in range(runs):
        for name, (function, argument) in functions.items():
            hvd.barrier()
            begin = time.perf_counter()
            jax.block_until_ready(function(argument))
            times[name].append(time.perf_counter() - begin)
    if hvd.rank() == 0:
        medians = {name: statistics.median(each) * 1e6 for name, each in times.items()}
        base = medians.get("alone", 0.0)
        told = ", ".join(
            f"{name} {us:,.0f} us ({(us - base) / (medians['gloo'] - base):.2f})"
            for name, us in medians.items()
        )
        print(f"{what}: {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    args = parser.parse_args()
    mesh = initialize()
    for size, runs in ((1 << 10, args.runs), (1 << 18, args.runs), (1 << 24, args.runs // 4)):
        measure(f"sum of {size * 4:,} bytes", sums(mesh, size), runs)
    measure(f"step of {LAYERS} layers; ratios of the overhead", steps(mesh), args.runs // 2)


if __name__ == "__main__":
    main()
