"""For distributed optimizers of your own: a sub-class of `Distributed`, and `wrapped`.

A sub-class may override, besides the methods of Keras' optimizers, `_reduced`, which takes and
returns the gradients of one update. It may use `_reduced_among` with `Settings` other than its own,
`_settings`. `backend()` has the operations of the framework under Keras.
"""

from __future__ import annotations

from hororing._adapters.optimizer_options import Settings, checked_settings
from hororing.keras.backends import backend
from hororing.keras.callbacks import velocities
from hororing.keras.distributed import Distributed
from hororing.keras.wrapping import wrapped

__all__ = ["Distributed", "Settings", "backend", "checked_settings", "velocities", "wrapped"]
