"""Train a small CNN on scikit-learn's handwritten digits with a training loop of TensorFlow's.

    python examples/tensorflow_digits.py                    # one process
    hororun -np 2 python examples/tensorflow_digits.py       # two

Every line that makes it distributed is marked `# hvd`. With model.fit: keras_digits.py.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tqdm import tqdm

import hororing.tensorflow as hvd  # hvd

# The learning rate is for this many images per step, and grows with them.
REFERENCE_BATCH = 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.003, help=f"for {REFERENCE_BATCH} images")
    parser.add_argument("--warmup-epochs", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def datasets(seed: int) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Four fifths of the images to train, one fifth to test."""
    digits = load_digits()
    images = digits.images[..., None].astype(np.float32) / 16
    order = np.random.default_rng(seed).permutation(len(images))
    data = tf.data.Dataset.from_tensor_slices((images[order], digits.target[order]))
    return data.skip(len(order) // 5), data.take(len(order) // 5)


def shifted(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Move an image by up to one pixel."""
    return tf.image.random_crop(tf.image.pad_to_bounding_box(image, 1, 1, 10, 10), (8, 8, 1)), label


def network() -> keras.Model:
    layers = keras.layers
    return keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(24, 3, padding="same", activation="relu"),
        layers.Conv2D(48, 3, padding="same", activation="relu"), layers.MaxPooling2D(),
        layers.Conv2D(48, 3, padding="same", activation="relu"),
        layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10),
    ])  # fmt: skip


def accuracy(model: keras.Model, dataset: tf.data.Dataset) -> float:
    """Fraction of correctly classified images; each rank tests its share."""
    share = dataset.shard(hvd.size(), hvd.rank())  # hvd
    images, labels = next(iter(share.batch(len(share))))
    correct = tf.reduce_sum(tf.cast(tf.argmax(model(images), axis=1) == labels, tf.int64))
    correct = hvd.allreduce(correct, name="correct", op=hvd.Sum)  # hvd
    return int(correct) / len(dataset)


def main() -> None:
    args = arguments()
    hvd.init()  # hvd
    tf.config.threading.set_intra_op_parallelism_threads(1)  # enough for such small images
    keras.utils.set_random_seed(args.seed)
    train, test = datasets(args.seed)
    # The order is the same on every rank. Each takes its part, with the same number of batches.
    batch = args.batch_size * hvd.size()  # hvd
    steps_per_epoch = len(train) // batch
    batches = train.shuffle(len(train), seed=args.seed)
    batches = batches.shard(hvd.size(), hvd.rank())  # hvd
    batches = batches.map(shifted).batch(args.batch_size).take(steps_per_epoch)

    model = network()
    growth = batch / REFERENCE_BATCH
    optimizer = keras.optimizers.AdamW(args.lr, weight_decay=0.05)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)  # hvd
    hvd.broadcast_variables(optimizer.variables, root_rank=0)  # hvd
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    steps = args.epochs * steps_per_epoch
    warmup = args.warmup_epochs * steps_per_epoch

    def schedule(step: int) -> float:
        """From 1 up to the full rate, then down to zero."""
        risen = 1 + (growth - 1) * min(1.0, step / max(1, warmup))
        return risen * min(1.0, (steps - step) / max(1, steps - warmup))

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)  # hvd
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return hvd.allreduce(loss, name="loss")  # hvd

    with tqdm(total=steps, desc="train", disable=hvd.rank() != 0) as progress:  # hvd
        for step, (images, labels) in enumerate(batches.repeat(args.epochs)):
            optimizer.learning_rate = args.lr * schedule(step)
            loss = train_step(images, labels)
            progress.set_postfix(loss=f"{loss:.4f}", refresh=False)
            progress.update()

    result = accuracy(model, test)
    if hvd.rank() == 0:  # hvd
        print(f"test accuracy {result:.4f} after {steps} steps on {hvd.size()} ranks")
    hvd.shutdown()  # hvd


if __name__ == "__main__":
    main()
