"""Time to normalize an image of 224 x 224 x 3 to four channels of float16: table or arithmetic.

    python benchmarks/normalize.py

The table is `hororing.toolkit.data.normalize`; the arithmetic is NumPy's. They take turns. Printed
are the median and the 10th to 90th percentile, in us.
"""

from __future__ import annotations

import time

import numpy as np

from hororing.toolkit.data.normalize import Normalize


def main() -> None:
    normalize = Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    images = np.random.default_rng(0).integers(0, 256, (16, 224, 224, 3), np.uint8)
    scale, shift = normalize.scale.astype(np.float32), normalize.shift.astype(np.float32)

    def arithmetic(images: np.ndarray) -> np.ndarray:
        result = np.zeros((*images.shape[:-1], 4), np.float16)
        result[..., :3] = (images * scale + shift).astype(np.float16)
        return result

    times: dict[str, list[float]] = {"table": [], "arithmetic": []}
    for _ in range(9):
        for name, function in (("table", normalize), ("arithmetic", arithmetic)):
            begin = time.perf_counter()
            function(images)
            times[name].append((time.perf_counter() - begin) / len(images) * 1e6)
    for name, each in times.items():
        low, median, high = np.percentile(each, [10, 50, 90])
        print(f"{name:12} {median:6.1f} us per image  ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
