"""The package of `import horovod.runner.common.util`: its modules."""
