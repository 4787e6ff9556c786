"""hororing.keras on torch: the cases of keras_cases.py, and those of this backend alone."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import mpirun
import pytest

if __name__ == "cases":  # on the ranks
    os.environ["KERAS_BACKEND"] = "torch"
    sys.modules["tensorflow"] = None  # Keras imports it where it is, which takes long
    from keras_cases import *  # noqa: F403

CASES = re.findall(
    r"^def (case_\w+)",
    Path(__file__).with_name("keras_cases.py").read_text() + Path(__file__).read_text(),
    flags=re.MULTILINE,
)


@pytest.mark.parametrize("case", CASES)
def test_keras_on_torch(case: str):
    mpirun.cases_of(__file__, 2).check(case)
