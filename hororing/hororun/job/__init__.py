"""A job as hororun sees it: which ranks go where, what happens when one ends, and how all end.

It knows hosts only as `ProcessHost`s. Read first: start.py, then job.py (what every job is), with
fixed.py (a fixed number of ranks) or elastic.py (members come and go), and ending.py.
"""
