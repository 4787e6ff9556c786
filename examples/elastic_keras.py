"""Train with Keras on handwritten digits with ranks that may die, leave and join.

    hororun -np 3 --min-np 2 python examples/elastic_keras.py

Kill one process while it runs: the others continue, and a new one joins them. docs/elastic.md
"""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits

import hororing.keras as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.001, help="per rank")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    keras.utils.set_random_seed(1)
    digits = load_digits()
    images = digits.images.reshape(-1, 64).astype("float32") / 16
    labels = digits.target

    model = keras.Sequential([
        keras.Input((64,)),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10),
    ])  # fmt: skip
    hvd.init()  # the others wait for a new process from here to `train`
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(args.lr * hvd.size()))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)

    def scale_rate() -> None:
        optimizer.learning_rate = args.lr * hvd.size()

    state.register_reset_callbacks([scale_rate])

    @hvd.elastic.run
    def train(state: hvd.elastic.KerasState) -> None:
        if hvd.rank() == 0:
            print(f"{hvd.size()} ranks from epoch {state.epoch} on", flush=True)
        mine = np.arange(hvd.rank(), 1500 - 1500 % hvd.size(), hvd.size())  # equally many
        model.fit(
            images[mine],
            labels[mine],
            batch_size=args.batch_size,
            epochs=args.epochs,
            initial_epoch=state.epoch,
            verbose=0,
            callbacks=[
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.UpdateBatchStateCallback(state),
                # A failure costs one step at most, except on JAX; each epoch ends with a commit.
                hvd.elastic.CommitStateCallback(state, batches_per_commit=1000),
            ],
        )

    train(state)
    _, accuracy = model.evaluate(images[1500:], labels[1500:], verbose=0)
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy:.4f} after {state.epoch} epochs on {hvd.size()} ranks")


if __name__ == "__main__":
    main()
