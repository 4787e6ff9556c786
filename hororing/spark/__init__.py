"""Ranks on a Spark cluster: `run`.

A barrier stage has a task for each rank. The task starts the rank as a separate process, as
`hororing.run` does, and returns its answer. The store is in the driver. It needs PySpark on this
machine, and hororing on all executors.
"""

from __future__ import annotations

try:
    import pyspark as _pyspark  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"hororing.spark needs PySpark ({error}): pip install 'hororing[spark]'"
    ) from error

from hororing.spark.driver import run

__all__ = ["run"]
