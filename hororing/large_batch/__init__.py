"""Training with large batches and late ranks: what knows no framework."""
