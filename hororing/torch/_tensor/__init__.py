"""From a tensor of torch to a request: verbs, and their gradients.

It knows `_requests` and torch, and no optimizer. Read first: adapter.py (what a tensor is), then
verbs.py and autograd.py. uncompiled.py keeps functions out of the compiler.
"""
