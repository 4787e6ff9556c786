"""The conformance suite with JAX's adapter, eagerly. See conformance/."""

from __future__ import annotations

import os

import session

if __name__ == "cases":  # on the ranks
    os.environ["JAX_ENABLE_X64"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"

from conformance.suite import cases_by

globals().update(cases_by("jax"))

test_case = session.on_ranks(globals(), 1, 2, 3, push=[], session="jax")
