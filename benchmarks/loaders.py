"""Time per step with the frameworks' data loaders. Reading, transforming and training only sleep.

    python benchmarks/loaders.py        # --ms 30 30 30: read, transform, train

serial does everything in this process; DataLoader is torch's, with four persistent workers; tf.data
maps both parts in parallel. A batch has --mib MiB: 4.6 MiB are 32 8-bit images of 224 x 224 x 3.
Printed are the median and the 10th to 90th percentile, in ms.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ms", type=float, nargs=3, default=[30, 30, 30])
    parser.add_argument("--mib", type=float, default=4.6)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    read_s, transform_s, train_s = (each / 1000 for each in args.ms)

    def read(number: int) -> np.ndarray:
        time.sleep(read_s)
        return np.full(int(args.mib * 2**20), number % 256, np.uint8)

    def transform(batch: np.ndarray) -> np.ndarray:
        time.sleep(transform_s)
        return batch

    def serial() -> Iterable[object]:
        return (transform(read(number)) for number in range(args.steps))

    def data_loader() -> Iterable[object]:
        import torch

        def collate(number: int) -> torch.Tensor:  # runs in a worker
            return torch.from_numpy(transform(read(number)))

        options = {"batch_size": None, "num_workers": 4, "persistent_workers": True}
        return torch.utils.data.DataLoader(range(args.steps), collate_fn=collate, **options)

    def tf_data() -> Iterable[object]:  # last: its threads make forking unsafe
        import tensorflow as tf

        batches = tf.data.Dataset.range(args.steps)
        for part in (read, transform):
            batches = batches.map(
                lambda x, part=part: tf.numpy_function(part, [x], tf.uint8),
                num_parallel_calls=tf.data.AUTOTUNE,
            )
        return batches.prefetch(tf.data.AUTOTUNE)

    for name, batches in (("serial", serial), ("DataLoader", data_loader), ("tf.data", tf_data)):
        times = []
        for _ in batches():
            time.sleep(train_s)
            times.append(time.perf_counter())
        low, median, high = np.percentile(np.diff(times) * 1000, [10, 50, 90])
        print(f"{name:12} {median:6.2f} ms per step  ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
