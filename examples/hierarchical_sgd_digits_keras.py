"""Train a small CNN on handwritten digits by hierarchical SGD with model.fit of Keras 3.

    hororun -np 4 python examples/hierarchical_sgd_digits_keras.py
    KERAS_BACKEND=torch mpirun -np 4 python examples/hierarchical_sgd_digits_keras.py

It trains twice, with the same data and with ranks that are late at random in the same steps:
synchronously, and with pairs of ranks that average their weights every 2 steps and all of them
every 8th. The last lines show the time saved. `--ways` has more, as in hierarchical_sgd_digits.py.
"""

import argparse
import time

import keras
import numpy as np
from sklearn.datasets import load_digits

import hororing.keras as hvd
from hororing.toolkit.keras.optim import HierarchicalSGD, HierarchicalSGDCallback
from hororing.toolkit.stragglers import StragglerInjector
from hororing.toolkit.tracking import RunRecord

WAYS = ["synchronous", "local", "hierarchical", "delayed"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["synchronous", "hierarchical"])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--warmup-steps", type=int, default=16, help="synchronous ones")
    parser.add_argument("--batch-size", type=int, default=16, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--pair", type=int, default=2, help="ranks that average every 2 steps")
    parser.add_argument("--probability", type=float, default=0.1, help="that a rank is late")
    parser.add_argument("--delay", type=float, default=0.2, help="how late, in seconds")
    parser.add_argument("--record", help="write the loss after every 8 steps into this folder")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


class Late(keras.callbacks.Callback):
    """Sleeps at random, and measures the time of training after the first step."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.sleep = StragglerInjector(args.probability, args.delay, seed=args.seed)
        self.begin = 0.0
        self.snapshots = [] if args.record else None

    def on_train_batch_begin(self, batch, logs=None) -> None:
        if batch == 1:
            self.begin = time.perf_counter()
        self.sleep()

    def on_train_batch_end(self, batch, logs=None) -> None:
        """Keras would call the other one in the background without this."""
        if self.snapshots is not None and batch % 8 == 7:  # tested later
            seconds = time.perf_counter() - self.begin
            self.snapshots.append((batch + 1, seconds, self.model.get_weights()))


def datasets(args: argparse.Namespace) -> tuple[np.ndarray, ...]:
    """This rank's part of the images to train, step by step, and those to test."""
    digits = load_digits()
    images = digits.images[..., None].astype(np.float32) / 16
    order = np.random.default_rng(args.seed).permutation(len(images))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    steps = [np.random.default_rng((args.seed, step)) for step in range(args.steps)]
    mine = slice(hvd.rank(), hvd.size() * args.batch_size, hvd.size())
    rows = np.concatenate([train[step.permutation(len(train))[mine]] for step in steps])
    return images[rows], digits.target[rows], images[test], digits.target[test]


def network(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same"), layers.BatchNormalization(), layers.ReLU(),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, padding="same"), layers.BatchNormalization(), layers.ReLU(),
        layers.Flatten(), layers.Dense(10),
    ])  # fmt: skip


def write_record(args: argparse.Namespace, way: str, late: Late, test: tuple) -> None:
    """Log time, and loss and accuracy of the ranks' mean weights, for each snapshot of a rank."""
    config = {**vars(args), "way": way, "ranks": hvd.size()}
    with RunRecord(args.record, config, seed=args.seed) as record:
        for step, seconds, weights in late.snapshots:
            late.model.set_weights([hvd.allreduce(each) for each in weights])
            loss, accuracy = late.model.evaluate(*test, verbose=0)
            latest = float(hvd.allreduce(seconds, op=hvd.Max))
            record.log(step, {"loss": loss, "accuracy": accuracy, "seconds": latest})


def train(args: argparse.Namespace, way: str) -> tuple[float, float, float]:
    """Return seconds per step, and loss and accuracy on the test images."""
    images, labels, test_images, test_labels = datasets(args)
    model = network(args.seed)
    optimizer = keras.optimizers.SGD(args.lr, momentum=0.9)
    pair = args.pair if hvd.size() % args.pair == 0 else 1
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    if way == "synchronous":
        optimizer = hvd.DistributedOptimizer(optimizer)
    else:
        optimizer = HierarchicalSGD(
            optimizer,
            period_group_size_dict={8: "world"} if way == "local" else {2: pair, 8: "world"},
            warmup_steps=args.warmup_steps,
            gradient_groups=None,  # on several hosts: "host"
            delay_steps=1 if way == "delayed" else 0,
        )
        callbacks.append(HierarchicalSGDCallback())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    late = Late(args)
    model.fit(
        images, labels, args.batch_size, shuffle=False, verbose=0, callbacks=[*callbacks, late]
    )
    hvd.barrier()  # until the last rank has finished
    seconds = (time.perf_counter() - late.begin) / max(1, args.steps - 1)
    loss, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    if args.record:
        write_record(args, way, late, (test_images, test_labels))
    return seconds, loss, accuracy


def main() -> None:
    args = arguments()
    hvd.init()
    found = [train(args, way) for way in args.ways]
    if hvd.rank() == 0:
        for way, (seconds, loss, _) in zip(args.ways, found, strict=True):
            print(f"{way + ':':<13} {seconds * 1e3:6.1f} ms per step, test loss {loss:.4f}")
        print("test accuracy " + " and ".join(f"{accuracy:.4f}" for _, _, accuracy in found))
        saved = 1 - found[-1][0] / found[0][0]  # the last way's, against the first
        print(f"saved {saved:.0%} of the time in {args.steps} steps on {hvd.size()} ranks")
    hvd.shutdown()


if __name__ == "__main__":
    main()
