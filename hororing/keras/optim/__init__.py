"""Optimizers of hororing for Keras 3."""

from hororing.keras.optim.hierarchical import HierarchicalSGD
from hororing.keras.optim.hierarchical_callback import HierarchicalSGDCallback

__all__ = ["HierarchicalSGD", "HierarchicalSGDCallback"]
