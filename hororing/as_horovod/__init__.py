"""Scripts written for Horovod, unchanged::

    mpirun -np 4 python -m hororing.as_horovod train.py --its --own arguments

In this process ``import horovod.torch`` and the other modules of `hororing.as_horovod.names` give
hororing's; nothing is written anywhere. From Python, before the first import of horovod::

    import hororing.as_horovod
    hororing.as_horovod.install()

Worker processes of multiprocessing (data loaders) inherit it with every start method; other
programs that the script starts do not. See docs/migrating.md.
"""

from hororing.as_horovod.finder import install

__all__ = ["install"]
