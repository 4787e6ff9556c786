"""The one `Verbs` over torch tensors."""

from __future__ import annotations

import torch

from hororing.torch.adapter import TorchAdapter
from hororing.verbs import Verbs

verbs: Verbs[torch.Tensor] = Verbs(TorchAdapter())
