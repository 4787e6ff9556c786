"""Tools for training with large batches, on top of hororing. Nothing outside imports them.

Without a framework: `large_batch` (hierarchical averaging, schedules), `data` (shards, exact
evaluation), `tracking` (records of runs), `stragglers` (slow ranks). With one: `torch`, `keras` and
`tensorflow`. Only public names of hororing are used here.
"""
