"""`hororing.toolkit.data.normalize.Normalize` for tensors, on their device."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from hororing.toolkit.data import normalize


class Normalize:
    """Normalises uint8 images with channels last: (..., C) to float16 (..., `channels`).

    On the CPU by the tables of `hororing.toolkit.data.normalize.Normalize`, whose arguments it has;
    elsewhere by arithmetic in float32, rounded to float16: within one unit in the last place.

    >>> normalize = Normalize(mean=[0.5] * 3, std=[0.25] * 3, channels=4)
    >>> normalize(torch.zeros(8, 8, 3, dtype=torch.uint8)).shape
    torch.Size([8, 8, 4])
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._host = normalize.Normalize(*args, **options)
        self._factors: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Return the normalised images, on the device of `images`."""
        self._host.check(images.dtype == torch.uint8, images.dtype, images.shape)
        if images.device.type == "cpu":
            return torch.from_numpy(self._host(images.numpy()))
        return self.by_arithmetic(images)

    def by_arithmetic(self, images: torch.Tensor) -> torch.Tensor:
        """Return the same as floating-point operations that any device has."""
        if images.device not in self._factors:
            scale, shift = (
                torch.from_numpy(each).to(images.device, torch.float32)
                for each in (self._host.scale, self._host.shift)
            )
            self._factors[images.device] = (scale, shift)
        scale, shift = self._factors[images.device]
        y = torch.addcmul(shift, images.float(), scale).half()
        return functional.pad(y, (0, self._host.channels - y.shape[-1]))
