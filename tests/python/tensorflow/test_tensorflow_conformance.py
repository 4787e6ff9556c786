"""The conformance suite with TensorFlow's adapter, eagerly and in functions. See conformance/."""

from __future__ import annotations

import session
from conformance.suite import cases_by

globals().update(cases_by("tensorflow", "function"))

test_case = session.on_ranks(globals(), 1, 2, 3, push=[2], session="tensorflow")
