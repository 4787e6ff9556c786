"""For distributed optimizers of your own: a sub-class of `Distributed`, and `become`.

A sub-class may override, besides the methods of torch's optimizers:

    _become_distributed      starts to reduce gradients
    _check_nothing_in_flight raises if gradients are still being reduced
    _reduce_for_scaler       is called before GradScaler looks at gradients
    _agree_on_infinities     takes the flags that GradScaler has found
    _join_generation         is called when training begins or continues in an elastic job
    _before_state_is_read, _after_state_is_replaced
                             are called when state is saved or sent, loaded or received

and use `_settings` and `_reducer`, which is None if this rank reduces with no other rank.
"""

from __future__ import annotations

from hororing.torch._optimizer.distributed import Distributed, parameters
from hororing.torch.optimizer import become, checked_names

__all__ = ["Distributed", "become", "checked_names", "parameters"]
