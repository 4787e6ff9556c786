"""The toolkit for Keras 3: optimizers, data, statistics of batch normalisation, records of runs."""
