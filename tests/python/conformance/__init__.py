"""What every adapter must do: one suite, which each adapter plays.

A case is a function of a `Player` (players.py): it makes tensors, calls verbs and reads results of
one framework, in one of its modes. Cases run on every rank: test_conformance.py and
test_tensorflow_conformance.py start the jobs.
What only one framework has (views, in-place writes, handles, ...) is in that framework's files.
"""
