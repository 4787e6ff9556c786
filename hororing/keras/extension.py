"""To write distributed optimizers of one's own: a sub-class of `Distributed`, and `wrapped`.

A sub-class may override, beside the methods of Keras' optimizers, `_reduced`, which takes and
returns the gradients of one update, and use `_reduced_among` with other `Settings` than its own,
`_settings`. `backend()` is what the framework under Keras does.
"""

from __future__ import annotations

from hororing.keras.backends import backend
from hororing.keras.callbacks import velocities
from hororing.keras.distributed import Distributed, wrapped
from hororing.keras.settings import Settings, checked_settings

__all__ = ["Distributed", "Settings", "backend", "checked_settings", "velocities", "wrapped"]
