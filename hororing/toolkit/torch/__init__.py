"""The toolkit for PyTorch: optimizers, data, statistics of batch normalisation."""
