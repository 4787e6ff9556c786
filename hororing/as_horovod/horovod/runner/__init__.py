"""What `import horovod.runner` gives: what is not about starting ranks."""
