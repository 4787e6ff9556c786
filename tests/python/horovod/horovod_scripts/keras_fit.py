"""A training script for Horovod: model.fit with Horovod's callbacks, checkpoints and resume.

It knows nothing of hororing. The second half of the training starts from the last checkpoint, which
only rank 0 has written and reads.
"""

import argparse
import os

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--base-lr", type=float, default=0.02)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--warmup-epochs", type=int, default=2)
parser.add_argument("--checkpoints", required=True)
args = parser.parse_args()

hvd.init()
tf.random.set_seed(hvd.rank())  # ranks begin with different weights
verbose = 1 if hvd.rank() == 0 else 0

rng = np.random.default_rng(3)
centers = 2 * rng.normal(size=(4, 16))
labels = rng.integers(4, size=640)
inputs = (centers[labels] + rng.normal(size=(640, 16))).astype(np.float32)
train = slice(hvd.rank(), 512, hvd.size())
validation = slice(512 + hvd.rank(), 640, hvd.size())
scaled_lr = args.base_lr * hvd.size()


def new_model():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((16,)),
            tf.keras.layers.Dense(32, activation="relu"),
            tf.keras.layers.Dense(4, activation="softmax"),
        ]
    )
    optimizer = tf.keras.optimizers.SGD(scaled_lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16)
    model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def file_of(epoch):
    return os.path.join(args.checkpoints, f"epoch-{epoch}.keras")


def fit(model, first_epoch, last_epoch):
    callbacks = [
        # The others begin with rank 0's weights, which are random or from the checkpoint.
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        # Before all callbacks that use metrics.
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(
            initial_lr=scaled_lr, warmup_epochs=args.warmup_epochs, verbose=verbose
        ),
        tf.keras.callbacks.ReduceLROnPlateau(patience=10, verbose=verbose),
    ]
    if hvd.rank() == 0:
        callbacks.append(tf.keras.callbacks.ModelCheckpoint(file_of("{epoch}")))
    return model.fit(
        inputs[train],
        labels[train],
        batch_size=args.batch_size,
        epochs=last_epoch,
        initial_epoch=first_epoch,
        validation_data=(inputs[validation], labels[validation]),
        callbacks=callbacks,
        verbose=verbose,
    ).history


history = fit(new_model(), 0, args.epochs // 2)

# As after a restart, rank 0 looks for the last epoch.
resume_from = 0
if hvd.rank() == 0:
    resume_from = max(e for e in range(args.epochs + 1) if e == 0 or os.path.exists(file_of(e)))
resume_from = int(hvd.broadcast(resume_from, 0, name="resume_from"))
assert resume_from == args.epochs // 2
if hvd.rank() == 0:
    model = hvd.load_model(file_of(resume_from), compression=hvd.Compression.fp16)
else:
    model = new_model()
more = fit(model, resume_from, args.epochs)

assert int(model.optimizer.iterations) == args.epochs * (512 // hvd.size() // args.batch_size)
for value in model.get_weights():
    everywhere = hvd.allgather(value[None])
    assert (everywhere == everywhere[0]).all(), "ranks hold different weights"
for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
    values = np.array(history[name] + more[name])
    assert np.array_equal(hvd.broadcast(values, 0, name=name), values), f"{name} is not averaged"
score = hvd.allreduce(model.evaluate(inputs[validation], labels[validation], verbose=0)[1])
assert score > 0.9, score
if hvd.rank() == 0:
    print(f"done: {args.epochs} epochs, {hvd.size()} ranks")
