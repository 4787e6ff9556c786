"""Data for many processes: shards, exact evaluation, 8-bit images. Knows no framework.

`hororing.torch.data`, `hororing.keras.data` and `hororing.tensorflow.data` are the forms that
PyTorch, Keras and tf.data take. Guide: docs/large_batch.md.
"""
