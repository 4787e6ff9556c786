"""From an array of JAX to a request: eager, in compiled programs, and with gradients.

Only hororing.jax uses it. Read first: primitive.py (a request as a primitive of JAX), then
program.py (names in compiled programs) and gradients.py.
"""
