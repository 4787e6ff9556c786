"""From a tensor of TensorFlow to a request: eager, in graphs, and with gradients.

Only hororing.tensorflow uses it. Read first: requests.py (submission and wait, as operations of a
graph), then ordering.py (calls of one name keep their order) and autograd.py.
"""
