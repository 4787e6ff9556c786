"""Ranks as tasks of Spark, in a real local Spark. Full tier, 60 s; skipped without Spark."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tiers

from hororing.errors import RunError

MISSING = " and ".join(
    each
    for each, there in (
        ("PySpark (pip install 'hororing[spark]')", importlib.util.find_spec("pyspark")),
        ("java", shutil.which("java")),
    )
    if not there
)
needs_spark = pytest.mark.skipif(bool(MISSING), reason=f"missing: {MISSING}")


def test_without_spark_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    """Push tier, 0 s."""
    monkeypatch.delitem(sys.modules, "hororing.spark", raising=False)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(ImportError, match=r"needs PySpark .*pip install 'hororing\[spark\]'"):
        importlib.import_module("hororing.spark")


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    """A session with resources for two tasks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("HORORING_STALL_WARNING_S", "33")
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        session = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
        yield session
        session.stop()


# Functions of the ranks, which find this module by the driver's sys.path.


def total(factor: float, *, offset: int) -> dict[str, Any]:
    import hororing.numpy as hvd

    hvd.init()
    mine = np.full(3, factor * (hvd.rank() + offset))
    return {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local": (hvd.local_rank(), hvd.local_size()),
        "sum": hvd.allreduce(mine, op=hvd.Sum).tolist(),
        "variables": dict(os.environ),
        "pid": os.getpid(),
    }


def fails(how: str) -> None:
    import hororing.numpy as hvd

    hvd.init()
    if hvd.rank() == 1:
        print("last words", file=sys.stderr)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exited":
            sys.exit(3)
        if how == "lost":
            os.kill(os.getppid(), signal.SIGKILL)
        raise KeyError("of one")
    hvd.barrier()


@tiers.full
@needs_spark
def test_results_come_in_the_order_of_ranks(spark: Any):
    import hororing.spark

    answers = hororing.spark.run(
        total, (2.0,), {"offset": 1}, num_proc=2, env={"OF_THIS_TEST": 7},
        nics=["absent0", "lo"], verbose=2,
    )  # fmt: skip
    assert [each["rank"] for each in answers] == [0, 1]
    for rank, each in enumerate(answers):
        assert (each["size"], each["local"], each["sum"]) == (2, (rank, 2), [6.0] * 3)
        told = each["variables"]
        assert told["OF_THIS_TEST"] == "7"
        assert told["HORORING_STALL_WARNING_S"] == "33"  # inherited from this process
        assert told["HORORING_INTERFACE"] == "absent0,lo"
        secrets = [name for name in told if name.startswith("HORORING_SECRET")]
        assert secrets == ["HORORING_SECRET_FD"]  # a file descriptor
    again = hororing.spark.run(total, (1.0,), {"offset": 0})  # Spark's default parallelism
    assert len(again) == 2
    # Spark reuses its processes, but those of ranks are new.
    assert not {each["pid"] for each in answers} & {each["pid"] for each in again}


@tiers.full
@needs_spark
@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("raised", 1, r"rank 1 on host \S+ raised KeyError: 'of one'(.|\n)*in fails"),
        ("killed", -9, r"rank 1 on host \S+ was killed by SIGKILL(.|\n)*last words"),
        ("exited", 3, r"rank 1 on host \S+ has failed with exit code 3(.|\n)*last words"),
        ("lost", None, r"Spark could not run the tasks( \(rank 1 was lost first\))?: "),
    ],
)
def test_the_rank_that_fails_is_named(how: str, code: int | None, text: str, spark: Any):
    import hororing.spark

    with pytest.raises(RunError, match=text) as failed:
        hororing.spark.run(fails, [how])
    assert failed.value.exit_code == code
    assert failed.value.rank == 1 or (how == "lost" and failed.value.rank == -1)
    assert isinstance(failed.value.__cause__, KeyError) == (how == "raised")


@tiers.full
@needs_spark
def test_too_few_cores_are_an_error(spark: Any):
    import hororing.spark

    with pytest.raises(RunError, match=r"not started 3 tasks at once within 2 s .*start_timeout"):
        hororing.spark.run(total, (1.0,), {"offset": 0}, num_proc=3, start_timeout=2)
    assert len(hororing.spark.run(total, (1.0,), {"offset": 0}, num_proc=1)) == 1


@tiers.full
@needs_spark
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"use_mpi": True}, "use_mpi=True: there is no MPI"),
        ({"stdout": sys.stdout}, "stdout=.*: what ranks print is in the logs"),
        ({"num_proc": 0}, "num_proc=0 is not a whole number from 1"),
    ],
)
def test_arguments_that_cannot_be_met_are_refused(arguments: dict[str, Any], text: str, spark: Any):
    import hororing.spark

    with pytest.raises(ValueError, match=text):
        hororing.spark.run(total, **arguments)


@tiers.full
@needs_spark
def test_without_a_context_there_is_nothing_to_run_on(monkeypatch: pytest.MonkeyPatch):
    import pyspark

    import hororing.spark

    monkeypatch.setattr(pyspark.SparkContext, "_active_spark_context", None)
    with pytest.raises(ValueError, match="there is no SparkContext"):
        hororing.spark.run(total)


@tiers.full
@needs_spark
def test_horovods_name_is_the_same_and_estimators_have_a_way_out():
    program = (
        "import hororing.as_horovod, hororing.spark\n"
        "hororing.as_horovod.install()\n"
        "import horovod.spark\n"
        "assert horovod.spark.run is hororing.spark.run\n"
        "try: import horovod.spark.keras\n"
        "except ImportError as error: assert 'no estimators' in str(error), error\n"
        "try: horovod.spark.run_elastic\n"
        "except AttributeError as error: assert 'hororun --min-np' in str(error), error\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
