"""The engine of this process, over the C interface.

It knows the core (core.py is the one module that loads it) and nothing of tensors, verbs or
frameworks. `_requests` and `_api` use it.

Read first: state.py (rank, size and what else `init` found), then start_config.py (knobs as the
core takes them), shutdown.py (the end of the engine, and of the process) and membership.py (the
generations of an elastic job). Beside them: logs, statistics, timeline, recorder and doctor show
what the engine does; mpi.py and nccl.py find libraries.
"""
