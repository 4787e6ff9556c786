"""Data for PyTorch on many ranks: sharding samplers, exact evaluation, 8-bit images.

Guide: docs/large_batch.md.
"""

from hororing.torch.data.evaluation import correct, evaluate, masked_loader
from hororing.torch.data.normalize import Normalize
from hororing.torch.data.sampler import ShardSampler

__all__ = ["Normalize", "ShardSampler", "correct", "evaluate", "masked_loader"]
