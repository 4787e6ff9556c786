"""Train on scikit-learn's handwritten digits in JAX with ranks that may die, leave and join.

    hororun -np 3 --min-np 2 python examples/jax_elastic.py

Kill one process while it runs: the others continue, and a new one joins them. docs/elastic.md
"""

import argparse

import jax
import numpy as np
import optax
from jax import numpy as jnp
from sklearn.datasets import load_digits

import hororing.jax as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.003)
    return parser.parse_args()


def logits_of(params: dict, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params["in"]) @ params["out"] + params["bias"]


def loss_of(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x), y)
    return losses.mean()


def main() -> None:
    args = arguments()
    digits = load_digits()
    images = (digits.images / 16).reshape(-1, 64).astype(np.float32)
    labels = digits.target
    keys = jax.random.split(jax.random.key(1))
    initial = jax.nn.initializers.lecun_normal()
    params = {
        "in": initial(keys[0], (64, 128)),
        "out": initial(keys[1], (128, 10)),
        "bias": jnp.zeros(10),
    }
    hvd.init()  # the others wait for a new process from here to `train`
    optimizer = hvd.DistributedOptimizer(optax.adam(args.lr))
    state = hvd.elastic.JaxState(params=params, opt_state=optimizer.init(params), epoch=0)

    @jax.jit
    def step(params: dict, opt_state: tuple, x: jax.Array, y: jax.Array) -> tuple:
        gradients = jax.grad(loss_of)(params, x, y)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    @hvd.elastic.run
    def train(state: hvd.elastic.JaxState) -> None:
        if hvd.rank() == 0:
            print(f"{hvd.size()} ranks from epoch {state.epoch} on", flush=True)
        while state.epoch < args.epochs:
            order = np.random.default_rng(state.epoch).permutation(1500)
            batch = args.batch_size * hvd.size()
            for at in range(0, len(order) - batch + 1, batch):
                rows = order[at : at + batch][hvd.rank() :: hvd.size()]
                state.params, state.opt_state = step(
                    state.params, state.opt_state, images[rows], labels[rows]
                )
            state.epoch += 1
            state.commit()

    train(state)
    right = logits_of(state.params, images[1500:]).argmax(-1) == labels[1500:]
    if hvd.rank() == 0:
        accuracy = float(right.mean())
        print(f"test accuracy {accuracy:.4f} after {state.epoch} epochs on {hvd.size()} ranks")
        if accuracy < 0.9:
            raise SystemExit("it has not learned")


if __name__ == "__main__":
    main()
