"""Train a small CNN of flax on scikit-learn's handwritten digits with JAX and optax.

    python examples/jax_digits.py                    # one process
    hororun -np 2 python examples/jax_digits.py       # two

Every line that makes it distributed is marked `# hvd`.
"""

import argparse

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import hororing.jax as hvd  # hvd

# The learning rate is for this many images per step, and grows with them.
REFERENCE_BATCH = 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.003, help=f"for {REFERENCE_BATCH} images")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--accuracy", type=float, default=0.0, help="fail below this on the test")
    return parser.parse_args()


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(24, (3, 3))(x))
        x = nn.relu(nn.Conv(48, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Conv(48, (3, 3))(x))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


def main() -> None:
    args = arguments()
    hvd.init()  # hvd
    digits = load_digits()
    order = np.random.default_rng(args.seed).permutation(len(digits.images))
    images = (digits.images[order, ..., None] / 16).astype(np.float32)
    labels = digits.target[order]
    tests = len(order) // 5
    # The order is the same on every rank. Each takes its part, with the same number of batches.
    batch = args.batch_size * hvd.size()  # hvd
    steps_per_epoch = (len(order) - tests) // batch
    mine = slice(hvd.rank(), None, hvd.size())  # hvd

    network = Network()
    growth = batch / REFERENCE_BATCH
    steps = args.epochs * steps_per_epoch
    rate = optax.warmup_cosine_decay_schedule(0, args.lr * growth**0.5, steps // 10, steps)
    optimizer = hvd.DistributedOptimizer(optax.adamw(rate, weight_decay=0.05))  # hvd
    params = network.init(jax.random.key(args.seed), images[:1])
    params = hvd.broadcast_parameters(params, root_rank=0)  # hvd
    state = optimizer.init(params)

    def loss_of(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = network.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @jax.jit
    def step(params: dict, state: tuple, x: jax.Array, y: jax.Array) -> tuple:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)  # reduces the gradients
        return optax.apply_updates(params, updates), state, hvd.metric_average(loss)  # hvd

    @jax.jit
    def correct(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        return (network.apply(params, x).argmax(-1) == y).sum()

    for epoch in range(args.epochs):
        shuffled = tests + np.random.default_rng(epoch).permutation(len(order) - tests)
        for at in range(steps_per_epoch):
            rows = shuffled[at * batch : (at + 1) * batch][mine]  # hvd
            params, state, loss = step(params, state, images[rows], labels[rows])
        if hvd.rank() == 0:  # hvd
            print(f"epoch {epoch + 1}: loss {loss:.4f}", flush=True)
    right = correct(params, images[:tests][mine], labels[:tests][mine])
    accuracy = int(hvd.allreduce(right, op=hvd.Sum)) / tests  # hvd
    if hvd.rank() == 0:  # hvd
        print(f"test accuracy {accuracy:.4f} after {steps} steps on {hvd.size()} ranks")
    if accuracy < args.accuracy:
        raise SystemExit(f"the test accuracy {accuracy:.4f} is below {args.accuracy}")


if __name__ == "__main__":
    main()
