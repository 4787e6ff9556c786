"""Optimizers, schedules and mixed precision for large batches; docs/large_batch.md.

They work with `hororing.torch.DistributedOptimizer`, and without it; `HierarchicalSGD` takes its
place (docs/stragglers.md).
"""

from hororing.toolkit.torch.optim.float32_update import with_float32_update
from hororing.toolkit.torch.optim.grad_scaler import GradScaler
from hororing.toolkit.torch.optim.hierarchical_sgd import HierarchicalSGD
from hororing.toolkit.torch.optim.lamb import LAMB
from hororing.toolkit.torch.optim.lars import LARS
from hororing.toolkit.torch.optim.parameter_groups import parameter_groups, zero_last_gammas
from hororing.toolkit.torch.optim.rounding import StochasticCast, StochasticRounding, round_into
from hororing.toolkit.torch.optim.schedules import ScheduleLR

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
