"""Optimizers, schedules and mixed precision for large batches; docs/large_batch.md.

They work with `hororing.torch.DistributedOptimizer`, and without it; `HierarchicalSGD` takes its
place (docs/stragglers.md).
"""

from hororing.torch.optim.float32_update import with_float32_update
from hororing.torch.optim.grad_scaler import GradScaler
from hororing.torch.optim.hierarchical_sgd import HierarchicalSGD
from hororing.torch.optim.lamb import LAMB
from hororing.torch.optim.lars import LARS
from hororing.torch.optim.parameter_groups import parameter_groups, zero_last_gammas
from hororing.torch.optim.rounding import StochasticCast, StochasticRounding, round_into
from hororing.torch.optim.schedules import ScheduleLR

__all__ = [
    "LAMB",
    "LARS",
    "GradScaler",
    "HierarchicalSGD",
    "ScheduleLR",
    "StochasticCast",
    "StochasticRounding",
    "parameter_groups",
    "round_into",
    "with_float32_update",
    "zero_last_gammas",
]
