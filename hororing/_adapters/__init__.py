"""What several adapters share, without a framework.

It knows the verbs (hororing.numpy) and the loop of elastic training. The adapters for torch,
TensorFlow, Keras and JAX use it, and `hororing.extension` publishes parts of it.

Read first: optimizer_options.py (every argument of a distributed optimizer or tape, checked once).
replica_check.py compares the parameters of all ranks; batch_norm_groups.py, fit_callbacks.py and
elastic_callbacks.py are the neutral halves of layers and callbacks.
"""
