"""Data for Keras on many ranks: sharded data sets and exact evaluation.

Guide: docs/large_batch.md.
"""

from hororing.toolkit.keras.data.evaluation import evaluate
from hororing.toolkit.keras.data.sharding import ShardedArrays

__all__ = ["ShardedArrays", "evaluate"]
