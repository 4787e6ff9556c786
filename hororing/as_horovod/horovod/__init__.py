"""What `import horovod` gives."""

from hororing.as_horovod.horovod.runner import run as run

# Of the Horovod whose interface this is; scripts compare it. Ours is hororing.__version__.
__version__ = "0.28.1"
