"""Optimizers, schedules and loss scaling for large batches; docs/large_batch.md.

They work with `hororing.keras.DistributedOptimizer`, and without it; `HierarchicalSGD` takes its
place (docs/stragglers.md). Files that hold them load once this package is imported.
"""

from hororing.toolkit.keras.optim.hierarchical import HierarchicalSGD
from hororing.toolkit.keras.optim.hierarchical_callback import HierarchicalSGDCallback
from hororing.toolkit.keras.optim.lamb import LAMB
from hororing.toolkit.keras.optim.lars import LARS
from hororing.toolkit.keras.optim.loss_scale import LossScaleOptimizer
from hororing.toolkit.keras.optim.rounding import StochasticCast, round_stochastically
from hororing.toolkit.keras.optim.schedules import ScheduleCallback, WarmupPolynomial
from hororing.toolkit.large_batch.stochastic_rounding import StochasticRounding

__all__ = [
    "LAMB",
    "LARS",
    "HierarchicalSGD",
    "HierarchicalSGDCallback",
    "LossScaleOptimizer",
    "ScheduleCallback",
    "StochasticCast",
    "StochasticRounding",
    "WarmupPolynomial",
    "round_stochastically",
]
