"""The package of `import horovod.runner.common`: its modules."""
