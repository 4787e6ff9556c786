"""Detects whether tf.keras is Keras 2 or 3."""

from __future__ import annotations

import tensorflow as tf


def is_legacy() -> bool:
    """Whether tf.keras is Keras 2: tf_keras, which TensorFlow takes with TF_USE_LEGACY_KERAS=1."""
    return str(tf.keras.Model.__module__).startswith("tf_keras.")
