"""A job as hororun sees it: which ranks go where, what happens when one ends, and how all end.

It knows hosts only as objects with `start`, `signal` and the like. Read first: start.py, then
fixed.py (a job of a fixed number of ranks) or elastic.py (members come and go), and ending.py.
"""
