"""Starts the ranks of a job, on this host or on several, and waits until all have ended.

It imports no framework; only `function` and `call` need more than the standard library
(cloudpickle). Nothing but ray, spark and the command `hororing` imports it.

Read first: command.py (the command line of hororun) or function.py (`hororing.run`, whose ranks
execute `call`), then job/ (start, watch, end), host/ (processes, here or over ssh) and flags/.
store_command.py is `hororing store`, for elastic jobs whose processes something else starts.
"""
