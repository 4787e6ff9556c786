"""The conformance suite, which every adapter must pass.

A case is a function of a `Player` (players.py), which makes tensors, calls verbs and reads results
of one framework in one of its modes. Cases run on every rank; test_conformance.py and
test_tensorflow_conformance.py start the jobs. Features of a single framework (views, in-place
writes, handles, ...) have their own test files.
"""
