"""What `import horovod` gives."""

# Of the Horovod whose interface this is; scripts compare it. Ours is hororing.__version__.
__version__ = "0.28.1"
