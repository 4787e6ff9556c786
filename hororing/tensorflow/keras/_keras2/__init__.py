"""Keras 2 (tf_keras), for scripts with TF_USE_LEGACY_KERAS=1: optimizer and callbacks."""
