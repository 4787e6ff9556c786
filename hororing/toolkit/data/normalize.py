"""Images that are sent as 8-bit numbers, then normalised to 16-bit numbers in four channels.

    y = half(a_c x + b_c),  a_c = 1 / (255 sigma_c),  b_c = -mu_c / sigma_c

This sends a quarter of the bytes of float32 (150,528 instead of 602,112 for 224 x 224 x 3). An
8-bit x has 256 values per channel, so y is looked up in a table, which is rounded once, from
float64: exact to the last bit, and three times as fast as NumPy's arithmetic
(benchmarks/normalize.py). Accelerators prefer four channels; the fourth is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Normalize:
    """Normalises uint8 images with channels last: (..., C) to float16 (..., `channels`).

    Parameters
    ----------
    mean, std : sequence of float
        Per channel, of images whose values are in [0, 1].
    channels : int, optional
        Of the result; those beyond the images' are 0.

    Raises
    ------
    ValueError : for lengths that differ, a std that is not positive, and fewer channels than the
        images have; when called, for images of another type or number of channels.

    Examples
    --------
    >>> normalize = Normalize(mean=[0.5, 0.5, 0.5], std=[0.25, 0.5, 1.0])
    >>> normalize(np.array([[[0, 255, 51]]], np.uint8))
    array([[[-2. ,  1. , -0.3,  0. ]]], dtype=float16)
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], channels: int = 4) -> None:
        mu, sigma = np.asarray(mean, np.float64), np.asarray(std, np.float64)
        if mu.ndim != 1 or mu.shape != sigma.shape or not (sigma > 0).all() or channels < len(mu):
            raise ValueError(
                f"Normalize: mean={mean!r}, std={std!r}, channels={channels}: must be equally many "
                "numbers, positive ones for std, and at least as many channels"
            )
        self.scale: NDArray[np.float64] = 1 / (255 * sigma)
        self.shift: NDArray[np.float64] = -mu / sigma
        self.channels = channels
        self.tables: list[NDArray[np.float16]] = [  # per channel, by value of x
            (np.arange(256) * a + b).astype(np.float16)
            for a, b in zip(self.scale, self.shift, strict=True)
        ]

    def __call__(self, images: NDArray[np.uint8]) -> NDArray[np.float16]:
        """Return the normalised images."""
        self.check(images.dtype == np.uint8, images.dtype, images.shape)
        result = np.zeros((*images.shape[:-1], self.channels), np.float16)
        for channel, table in enumerate(self.tables):
            result[..., channel] = np.take(table, images[..., channel])
        return result

    def check(self, is_uint8: bool, dtype: Any, shape: Sequence[int]) -> None:
        """Raise ValueError unless images can be normalised."""
        if not is_uint8 or not shape or shape[-1] != len(self.scale):
            raise ValueError(
                f"Normalize takes uint8 images of shape (..., {len(self.scale)}), not {dtype} "
                f"{tuple(shape)}"
            )
