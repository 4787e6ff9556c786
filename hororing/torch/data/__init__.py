"""Data for PyTorch on many ranks: sharding samplers and exact evaluation.

Guide: docs/large_batch_data.md.
"""

from hororing.torch.data.evaluation import correct, evaluate, masked_loader
from hororing.torch.data.sampler import ShardSampler

__all__ = ["ShardSampler", "correct", "evaluate", "masked_loader"]
