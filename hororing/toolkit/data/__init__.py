"""Data for many processes: shards, exact evaluation, 8-bit images. Needs no framework.

`hororing.toolkit.torch.data`, `hororing.toolkit.keras.data` and `hororing.toolkit.tensorflow.data`
are the forms that PyTorch, Keras and tf.data take. Guide: docs/large_batch.md.
"""
