"""Watching jobs from outside: a terminal view, a page, and metrics (docs/watching.md).

A sampler on each host reads the flight recorders of its ranks and figures of the kernel once a
second (sampler, kernel, links). What the samplers of a job say is compared (compare), and shown
(terminal, page, metrics). Nothing here runs in a rank, and nothing imports this package.
"""
