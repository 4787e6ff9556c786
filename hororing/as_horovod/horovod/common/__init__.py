"""What `import horovod.common` gives: its modules."""
