"""Data for PyTorch on many ranks: sharding samplers, exact evaluation, 8-bit images.

Guide: docs/large_batch.md.
"""

from hororing.toolkit.torch.data.evaluation import correct, evaluate, masked_loader
from hororing.toolkit.torch.data.normalize import Normalize
from hororing.toolkit.torch.data.sampler import ShardSampler

__all__ = ["Normalize", "ShardSampler", "correct", "evaluate", "masked_loader"]
