"""`wrapped`: makes an optimizer of Keras distributed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from hororing._adapters.optimizer_options import Settings
from hororing._requests.arguments import Adasum
from hororing.keras.backends import backend
from hororing.keras.distributed import Distributed
from hororing.keras.state import WRONG_ORDER


def wrapped(
    optimizer: Any,
    settings: Settings,
    local_layers: Iterable[Any] = (),
    mixin: type[Distributed] = Distributed,
    **namespace: Any,
) -> Any:
    """Make `optimizer` itself distributed and return it, or its LossScaleOptimizer.

    Its class is made of `mixin`, the optimizer's own class and `namespace`.
    """
    if not isinstance(optimizer, keras.Optimizer):
        of_keras_2 = type(optimizer).__module__.startswith("tf_keras.")
        remedy = "; tf_keras needs hororing.tensorflow.keras, and TF_USE_LEGACY_KERAS=1"
        raise TypeError(
            f"optimizer must be an optimizer of Keras 3, not {type(optimizer).__name__} "
            f"({optimizer!r}){remedy if of_keras_2 else ''}"
        )
    if isinstance(optimizer, Distributed):
        raise ValueError("optimizer is distributed already; wrap it once")
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales and isinstance(optimizer.inner_optimizer, Distributed):
        raise ValueError(WRONG_ORDER)
    if settings.op == Adasum and getattr(optimizer, "inner_optimizer", optimizer).use_ema:
        raise ValueError(
            "use_ema cannot be used with op=Adasum: averages would differ between ranks"
        )
    if not scales and keras.config.dtype_policy().name == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    base = type(optimizer)
    namespace |= {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "_settings": settings,
        "apply": backend().not_rewritten(Distributed.apply),
        # Keras writes this class into files, which then load without hororing; `isinstance` and
        # `type` use the real one.
        "__class__": property(lambda self: base),
    }
    # Bypasses Keras' __setattr__, which would compare classes first.
    object.__setattr__(optimizer, "__class__", type(base.__name__, (mixin, base), namespace))
    backend().outside_graphs(lambda: optimizer._become_distributed(tuple(local_layers)))
    return optimizer
