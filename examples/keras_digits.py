"""Train a small CNN on scikit-learn's handwritten digits with model.fit of Keras 3.

    python examples/keras_digits.py                                 # one process
    hororun -np 2 python examples/keras_digits.py                    # two
    hororun -np 2 python examples/keras_digits.py --checkpoint last.keras
    hororun -np 2 python examples/keras_digits.py --checkpoint last.keras --resume
    KERAS_BACKEND=torch mpirun -np 2 python examples/keras_digits.py

Every line that makes it distributed is marked `# hvd`.
"""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits

import hororing.keras as hvd  # hvd

# The learning rate is for this many images per step, and grows with them.
REFERENCE_BATCH = 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.003, help=f"for {REFERENCE_BATCH} images")
    parser.add_argument("--warmup-epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint", metavar="FILE.keras", help="save the model every epoch")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint")
    return args


Data = tuple[np.ndarray, np.ndarray]


def datasets(seed: int) -> tuple[Data, Data]:
    """Four fifths of the images to train, one fifth to test."""
    digits = load_digits()
    images = digits.images[..., None].astype(np.float32) / 16
    order = np.random.default_rng(seed).permutation(len(images))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    return (images[train], digits.target[train]), (images[test], digits.target[test])


def network() -> keras.Model:
    layers = keras.layers
    return keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.RandomTranslation(1 / 8, 1 / 8, fill_mode="constant"),
        layers.Conv2D(24, 3, padding="same", activation="relu"),
        layers.Conv2D(48, 3, padding="same", activation="relu"), layers.MaxPooling2D(),
        layers.Conv2D(48, 3, padding="same", activation="relu"),
        layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10),
    ])  # fmt: skip


def main() -> None:
    args = arguments()
    hvd.init()  # hvd
    first = hvd.rank() == 0  # hvd
    (images, labels), test = datasets(args.seed)
    keras.utils.set_random_seed(args.seed + hvd.rank())  # hvd
    # Each rank has its part of the images, and all have the same number of batches.
    batch = args.batch_size * hvd.size()  # hvd
    steps_per_epoch = len(images) // batch
    part = slice(hvd.rank(), steps_per_epoch * batch, hvd.size())  # hvd

    lr = args.lr * batch / REFERENCE_BATCH
    if args.resume and first:  # the others get the state from rank 0
        model = keras.models.load_model(args.checkpoint)
        optimizer = model.optimizer
    else:
        model = network()
        optimizer = keras.optimizers.AdamW(lr, weight_decay=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer)  # hvd
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    epochs_done = int(optimizer.iterations) // steps_per_epoch
    epochs_done = hvd.broadcast(epochs_done, root_rank=0, name="epochs done")  # hvd

    def decay(epoch: int) -> float:
        """Of the full rate, epoch by epoch after warm-up."""
        return (args.epochs - epoch) / (args.epochs - args.warmup_epochs)

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0),  # hvd
        hvd.callbacks.MetricAverageCallback(),  # hvd
        hvd.callbacks.LearningRateWarmupCallback(lr, args.warmup_epochs),  # hvd
        hvd.callbacks.LearningRateScheduleCallback(lr, decay, args.warmup_epochs),  # hvd
    ]
    if args.checkpoint and first:
        callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint))
    model.fit(
        images[part], labels[part], args.batch_size, args.epochs, verbose=int(first),
        callbacks=callbacks, initial_epoch=epochs_done,
    )  # fmt: skip

    images, labels = (array[hvd.rank() :: hvd.size()] for array in test)  # hvd
    correct = (model.predict(images, verbose=0).argmax(axis=1) == labels).sum()
    correct = hvd.allreduce(correct, name="correct", op=hvd.Sum)  # hvd
    if first:
        accuracy, steps = correct / len(test[0]), int(optimizer.iterations)
        print(f"test accuracy {accuracy:.4f} after {steps} steps on {hvd.size()} ranks")
    hvd.shutdown()  # hvd


if __name__ == "__main__":
    main()
