"""Batch normalisation of several ranks for Keras on TensorFlow."""

from hororing.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = ["SyncBatchNormalization"]
