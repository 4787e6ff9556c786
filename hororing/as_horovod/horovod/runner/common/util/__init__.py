"""What `import horovod.runner.common.util` gives: its modules."""
