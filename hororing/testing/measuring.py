"""Coverage of ranks, if the process of the tests is measured: pytest-cov, coverage run.

Each rank writes a file of its own beside that of the process of the tests, when it ends. pytest-cov
adds them up; after `coverage run`, `coverage combine` does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

_OPTIONS = ("source", "branch", "include", "omit", "concurrency")


def how() -> Mapping[str, Any] | None:
    """Return how this process is measured, as arguments of coverage.Coverage; None: it is not."""
    coverage: Any = sys.modules.get("coverage")
    found = coverage.Coverage.current() if coverage is not None else None
    if found is None:
        return None
    options = {name: found.get_option(f"run:{name}") or None for name in _OPTIONS}
    return {
        **options,
        "config_file": found.config.config_file or False,
        "data_file": os.path.abspath(found.get_option("run:data_file")),
    }


def begin(options: Mapping[str, Any] | None) -> Callable[[], None]:
    """Measure this process from now on; return a function that ends that, and saves it."""
    if options is None:
        return lambda: None
    import coverage

    measured = coverage.Coverage(**options, data_suffix=True)
    measured.start()

    def save() -> None:
        measured.stop()
        measured.save()

    return save
