"""An optimizer's memory for its compressor: errors, and factors of matrices.

It is part of the optimizer's state: saved, loaded and broadcast with it, by the names of
parameters. Errors differ between ranks; a broadcast gives all ranks those of the root. When an
engine starts, everything is forgotten: the ranks have changed, and a new one has no errors.

Note [Loss scales]. Errors are of gradients that `torch.amp.GradScaler` has scaled. The scale
changes between steps, so each bucket notes the scale of its errors, and multiplies them by the
ratio before it adds them to gradients with another scale.
"""

from __future__ import annotations

from typing import Final

import torch

from hororing.torch.compression.method import Kept

KEY: Final = "hororing.compression"  # in the optimizer's `state`


class Memory:
    """The state of each parameter, by its name."""

    def __init__(self) -> None:
        self.contents: dict[str, Kept] = {}
        self._scale: torch.Tensor | None = None  # the scaler's own
        self._first: torch.Tensor | None = None  # a copy of its first value
        self._scales: dict[str, torch.Tensor] = {}  # of the errors, by bucket

    def replace(self, contents: dict[str, Kept]) -> None:
        """Adopt other contents, which have the current scale."""
        self.contents = contents
        self._scales = {}
        self._first = None if self._scale is None else self._scale.clone()

    def note_scale(self, scale: torch.Tensor) -> None:
        """Note the scale of the last reduced gradients; it is about to change."""
        if self._scale is not scale:
            self._first = scale.clone()
        self._scale = scale

    def change_of_scale(self, bucket: str) -> torch.Tensor | None:
        """Return the factor for the errors of a bucket, or None if they need none."""
        if self._scale is None or self._first is None:
            return None
        before = self._scales.get(bucket, self._first)
        self._scales[bucket] = now = self._scale.clone()
        return now / before
