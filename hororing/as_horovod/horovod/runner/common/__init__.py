"""What `import horovod.runner.common` gives: its modules."""
