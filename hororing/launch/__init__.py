"""How this process was started, and what MPI should know before it is initialised.

Beside `hororing.config` the only place that reads or writes environment variables.
"""

from hororing.launch.environment import Launch, detect, prepare_mpi

__all__ = ["Launch", "detect", "prepare_mpi"]
