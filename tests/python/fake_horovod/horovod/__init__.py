"""Takes Horovod's place where benchmarks are tested."""
