"""Replaces Horovod in the tests of benchmarks."""
