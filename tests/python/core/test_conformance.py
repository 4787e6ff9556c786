"""The conformance suite with the adapters of NumPy and PyTorch. See conformance/."""

from __future__ import annotations

import mpirun
import pytest
import session
import tiers
from conformance.suite import cases_by

globals().update(cases_by("numpy", "torch"))

test_case = session.on_ranks(globals(), 1, 2, 3, 4, push=[1, 3], session="torch")


# test_conformance_algorithms.py also plays the results over MPI.
@tiers.full
@pytest.mark.timeout(mpirun.CASES_LIMIT_S + 20)
@pytest.mark.parametrize("case", mpirun.case_names(globals()))
@pytest.mark.parametrize("transport", ["mpi", "tcp"])
def test_case_over(transport: str, case: str):
    mpirun.cases_of(__file__, 3, HORORING_TRANSPORT=transport).check(case)
