"""Optimizers of hororing for PyTorch."""

from hororing.torch.optim.hierarchical_sgd import HierarchicalSGD

__all__ = ["HierarchicalSGD"]
