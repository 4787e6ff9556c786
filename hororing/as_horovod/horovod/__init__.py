"""The module of `import horovod`."""

from hororing.as_horovod.horovod.runner import run as run

# The version of Horovod with this interface; scripts compare it. Ours is hororing.__version__.
__version__ = "0.28.1"
