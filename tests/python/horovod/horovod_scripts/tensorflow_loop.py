"""A training script for Horovod: a custom loop in TensorFlow 2.

It knows nothing of hororing. Weights are broadcast after the first batch, when both the model and
the optimizer have them; only rank 0 writes a checkpoint.
"""

import argparse
import os

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--base-lr", type=float, default=0.005)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--checkpoints", required=True)
args = parser.parse_args()

hvd.init()

# One GPU per process, if there are any.
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

tf.random.set_seed(hvd.rank())  # ranks begin with different weights
rng = np.random.default_rng(3)
centers = 2 * rng.normal(size=(4, 16))
labels = rng.integers(4, size=640)
inputs = (centers[labels] + rng.normal(size=(640, 16))).astype(np.float32)
dataset = tf.data.Dataset.from_tensor_slices((inputs, labels)).shard(hvd.size(), hvd.rank())
dataset = dataset.repeat().shuffle(320, seed=hvd.rank()).batch(args.batch_size)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Dense(32, "relu"),
        tf.keras.layers.Dropout(0.1),
        tf.keras.layers.Dense(4, "softmax"),
    ]
)
loss_of = tf.losses.SparseCategoricalCrossentropy()
optimizer = tf.optimizers.Adam(args.base_lr * hvd.size())
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)


@tf.function
def training_step(inputs, labels, first_batch):
    with tf.GradientTape() as tape:
        predictions = model(inputs, training=True)
        loss = loss_of(labels, predictions)
    tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    return loss


losses = []
for step, (inputs, labels) in enumerate(dataset.take(args.steps)):
    loss = training_step(inputs, labels, step == 0)
    losses.append(float(hvd.allreduce(loss, name="loss")))
    if step % 20 == 0 and hvd.local_rank() == 0:
        print(f"step {step}: loss {losses[-1]:.4f}", flush=True)

if hvd.rank() == 0:
    checkpoint.save(os.path.join(args.checkpoints, "model"))

for variable in [*model.variables, *optimizer.variables]:
    if variable.dtype != "uint32":  # states of random generators differ, for dropout
        everywhere = hvd.allgather(tf.reshape(variable, [1, -1]))
        assert (everywhere.numpy() == everywhere[0].numpy()).all(), f"{variable.name} differs"
assert sum(losses[-5:]) < 0.3 * sum(losses[:5]), losses
assert int(optimizer.iterations) == args.steps
if hvd.rank() == 0:
    print(f"done: {len(losses)} steps, {hvd.size()} ranks")
