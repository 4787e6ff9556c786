"""The toolkit for tf.data."""
