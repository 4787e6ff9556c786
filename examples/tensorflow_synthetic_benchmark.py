"""Images per second of a network of keras.applications on synthetic images.

    python examples/tensorflow_synthetic_benchmark.py                    # one process
    hororun -np 2 python examples/tensorflow_synthetic_benchmark.py      # two

The options are those of Horovod's benchmark. Compare the total with the figure of one process to
see the scaling.
"""

import argparse
import statistics
import time

import keras
import tensorflow as tf
from tqdm import tqdm

import hororing.tensorflow as hvd  # hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="ResNet50", help="a name in keras.applications")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    parser.add_argument("--image-size", type=int, default=224, help="pixels per side")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="steps not measured")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="steps per figure")
    parser.add_argument("--num-iters", type=int, default=10, help="figures")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send 16-bit gradients")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")
    parser.add_argument("--no-cuda", action="store_true", help="use the CPU")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    hvd.init()  # hvd
    gpus = [] if args.no_cuda else tf.config.list_physical_devices("GPU")
    tf.config.set_visible_devices(gpus[hvd.local_rank() : hvd.local_rank() + 1], "GPU")  # hvd
    keras.utils.set_random_seed(1)
    shape = (args.image_size, args.image_size, 3)
    make = getattr(keras.applications, args.model)
    model = make(weights=None, input_shape=shape, classifier_activation=None)
    # Adasum needs no larger rate for more ranks.
    rate = 0.01 * (1 if args.use_adasum else hvd.size())  # hvd
    optimizer = keras.optimizers.SGD(rate)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)  # hvd
    hvd.broadcast_variables(optimizer.variables, root_rank=0)  # hvd
    images = tf.random.normal((args.batch_size, *shape))
    labels = tf.random.uniform((args.batch_size,), maxval=1000, dtype=tf.int64)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none  # hvd

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        op = hvd.Adasum if args.use_adasum else hvd.Average  # hvd
        tape = hvd.DistributedGradientTape(tape, compression=compression, op=op)  # hvd
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def steps(number: int) -> float:
        """Seconds that `number` steps take."""
        begin = time.perf_counter()
        for _ in range(number):
            step().numpy()  # waits for the step
        return time.perf_counter() - begin

    kind = "GPU" if gpus else "CPU"
    if hvd.rank() == 0:  # hvd
        print(f"{args.model}, {args.batch_size} images per step on each of {hvd.size()} {kind}(s)")
    steps(max(1, args.num_warmup_batches))  # the first one builds the graph
    rates = [
        args.batch_size * args.num_batches_per_iter / steps(args.num_batches_per_iter)
        for _ in tqdm(range(args.num_iters), desc="measure", disable=hvd.rank() != 0)  # hvd
    ]
    # Twice the standard deviation holds 95 of 100 figures, if they are normally distributed.
    mean, spread = statistics.mean(rates), 2 * statistics.pstdev(rates)
    if hvd.rank() == 0:  # hvd
        print(f"Img/sec per {kind}: {mean:.1f} +-{spread:.1f}")
        total, spread = hvd.size() * mean, hvd.size() * spread  # hvd
        print(f"Total img/sec on {hvd.size()} {kind}(s): {total:.1f} +-{spread:.1f}")
    hvd.shutdown()  # hvd


if __name__ == "__main__":
    main()
