"""The package of `import horovod.common`: its modules."""
