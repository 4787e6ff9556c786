"""What every adapter offers under Horovod's names, and how `init` finds its job.

It knows the floors below, and no framework. Adapters import `exports`.

Read first: find_job.py (one value: rank or unknown, how ranks meet, elastic or not), then init.py,
which starts the engine and registers process sets. built.py tells which libraries were found;
exports.py lists the names.
"""
