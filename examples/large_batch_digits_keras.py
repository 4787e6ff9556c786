"""Train on scikit-learn's handwritten digits with tools for large batches, with Keras 3.

    python examples/large_batch_digits_keras.py                           # one process
    hororun -np 4 python examples/large_batch_digits_keras.py              # four
    KERAS_BACKEND=torch mpirun -np 4 python examples/large_batch_digits_keras.py
    python examples/large_batch_digits_keras.py --record runs             # a test after each epoch

LARS; linear warm-up and polynomial decay by the effective batch; batch-norm over groups of ranks;
bfloat16 activations; exact evaluation (docs/large_batch.md). Every line that makes it distributed
is marked `# hvd`.
"""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits

import hororing.keras as hvd  # hvd
from hororing.keras.batch_norm import SyncBatchNormalization  # hvd
from hororing.toolkit.data.evaluation import masked_arrays  # hvd
from hororing.toolkit.data.sharding import Shard  # hvd
from hororing.toolkit.keras.batch_norm import AverageMovingStatistics  # hvd
from hororing.toolkit.keras.data import ShardedArrays, evaluate  # hvd
from hororing.toolkit.keras.optim import LARS, WarmupPolynomial
from hororing.toolkit.large_batch.groups import choose_group_size  # hvd
from hororing.toolkit.large_batch.schedules import effective_batch, linear_scaled_rate
from hororing.toolkit.tracking import RunRecord

# The learning rate is for this many images per update, and grows with them.
REFERENCE_BATCH = 256


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=45, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.5, help=f"for {REFERENCE_BATCH} images")
    parser.add_argument("--trust", type=float, default=0.01, help="trust coefficient of LARS")
    parser.add_argument("--warmup-epochs", type=int, default=5)
    parser.add_argument("--weight-decay", type=float, default=5e-5)
    parser.add_argument("--record", help="test after every epoch, and write it into this folder")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


Data = tuple[np.ndarray, np.ndarray]


def datasets(seed: int) -> tuple[Data, Data]:
    """Four fifths of the images to train, one fifth to test."""
    digits = load_digits()
    images = digits.images[..., None].astype(np.float32) / 16
    order = np.random.default_rng(seed).permutation(len(images))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    return (images[train], digits.target[train]), (images[test], digits.target[test])


def network(norm) -> keras.Model:
    """Two blocks around which their input passes; `norm` makes layers of batch normalisation."""
    layers = keras.layers
    hidden = inputs = keras.Input((8, 8, 1))
    hidden = layers.Conv2D(24, 3, padding="same")(hidden)
    for number in range(2):
        if number:
            hidden = layers.MaxPooling2D()(hidden)
        before = hidden
        hidden = layers.Conv2D(24, 3, padding="same", use_bias=False)(hidden)
        hidden = layers.Activation("relu")(norm()(hidden))
        hidden = layers.Conv2D(24, 3, padding="same", use_bias=False)(hidden)
        # Its gamma begins as zero, and the block as an identity.
        hidden = layers.Add()([before, norm(gamma_initializer="zeros")(hidden)])
        hidden = layers.Activation("relu")(hidden)
    outputs = layers.Dense(10, dtype="float32")(layers.Flatten()(hidden))
    return keras.Model(inputs, outputs)


class Record(keras.callbacks.Callback):
    """Tests after every epoch, and records the result."""

    def __init__(self, test: Data, record: RunRecord) -> None:
        super().__init__()
        self.test, self.record = test, record

    def on_epoch_end(self, epoch: int, logs=None) -> None:
        values = {name: each.mean for name, each in test_results(self.model, self.test).items()}
        self.record.log(epoch + 1, {**values, "steps": int(self.model.optimizer.iterations)})


def test_results(model: keras.Model, test: Data) -> dict:
    """Loss and accuracy, the same on all ranks."""

    def loss(labels, outputs):
        return keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)

    metrics = {"accuracy": keras.metrics.sparse_categorical_accuracy, "loss": loss}
    return evaluate(model, masked_arrays(test, 100), metrics)  # hvd


def main() -> None:
    args = arguments()
    hvd.init()  # hvd
    first = hvd.rank() == 0  # hvd
    keras.utils.set_random_seed(args.seed)
    keras.config.set_dtype_policy("mixed_bfloat16")
    train, test = datasets(args.seed)
    data = ShardedArrays(train, args.batch_size, Shard(len(train[0]), seed=args.seed))  # hvd
    options = {"group_size": choose_group_size(args.batch_size), "momentum": 0.9}  # hvd
    model = network(lambda **more: SyncBatchNormalization(**options, **more))  # hvd

    batch = effective_batch(args.batch_size, replicas=hvd.size())  # hvd
    rate = WarmupPolynomial(
        linear_scaled_rate(args.lr, batch, REFERENCE_BATCH),
        total_steps=args.epochs * data.num_batches,
        warmup_steps=args.warmup_epochs * data.num_batches,
    )
    optimizer = LARS(rate, weight_decay=args.weight_decay, trust_coefficient=args.trust)
    optimizer = hvd.DistributedOptimizer(optimizer)  # hvd
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0),  # hvd
        hvd.callbacks.MetricAverageCallback(),  # hvd
        data.callback(),
        AverageMovingStatistics(),  # hvd
    ]
    record = None
    if args.record:
        record = RunRecord(args.record, {**vars(args), "batch": batch}, seed=args.seed)
        callbacks.append(Record(test, record))
    model.fit(data, epochs=args.epochs, shuffle=False, callbacks=callbacks, verbose=2 * first)

    if record:
        record.close()
    result = test_results(model, test)["accuracy"]
    if first:
        steps, count = int(optimizer.iterations), int(result.total)
        print(f"effective batch {batch}, peak rate {rate.plan.peak:.4g}, {count} correct")
        print(f"test accuracy {result.mean:.4f} after {steps} steps on {hvd.size()} ranks")
    hvd.shutdown()  # hvd


if __name__ == "__main__":
    main()
