"""Serves scripts that ask torch.distributed for Intel's backend "ccl", whose package has ended.

    import hororing.as_ccl

instead of ``import oneccl_bindings_for_pytorch`` or ``import torch_ccl``; or before them, since
they are then this module unless they are installed. ``init_process_group("ccl")`` starts hororing
on the CPU (docs/coming_from.md).
"""

from __future__ import annotations

import importlib.util
import sys

from hororing import torch_backend

torch_backend.register_as("ccl")
for _name in ("oneccl_bindings_for_pytorch", "torch_ccl"):
    if _name not in sys.modules and importlib.util.find_spec(_name) is None:
        sys.modules[_name] = sys.modules[__name__]
