"""Ranks that disagree, and missing ranks: errors that name the ranks, on every rank.

conformance/refusals.py has the possible disagreements for each verb.
"""

from __future__ import annotations

import json
import logging
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpirun
import numpy as np
import pytest
import session
import tiers

import hororing.numpy as hvd
from hororing import errors

Call = Callable[[], Any]


def ones(*shape: int, dtype: str = "float32") -> Any:
    return np.ones(shape, dtype)


def values_by_rank(text: str) -> dict[int, str]:
    """Return the values by rank from an error such as "rank 0: [2]; ranks 1-3: [3]. Every ..."."""
    values: dict[int, str] = {}
    listed = text[text.index(" differ: ") + len(" differ: ") :]
    for ranks, value in re.findall(r"ranks? ([\d,-]+): (.*?)(?=; ranks? \d|\. [A-Z])", listed):
        for part in ranks.split(","):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                assert rank not in values, f"rank {rank} occurs twice in: {text}"
                values[rank] = value
    return values


def disagree(call: Call, name: str, what: str, wanted: dict[int, str]) -> str:
    """Fail unless `call` raises the same text with these values on all ranks."""
    with pytest.raises(errors.MismatchError) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, errors.HororingInternalError)
    text = str(caught.value)
    assert f"'{name}'" in text
    assert f"{what} differ: " in text
    assert values_by_rank(text) == wanted, text
    # All ranks have the same text, and the job goes on.
    assert set(hvd.allgather_object(text, name="compare texts")) == {text}
    return text


def by_rank(odd: int, usual: str, other: str) -> dict[int, str]:
    return {rank: other if rank == odd else usual for rank in range(hvd.size())}


# ---------------------------------------------------------------------------------------------
# Cases, on every rank


def case_init() -> None:
    hvd.init()


def case_a_barrier_has_a_name() -> None:
    odd = hvd.size() - 1
    disagree(
        hvd.barrier if hvd.rank() != odd else lambda: hvd.allreduce(ones(2), name="barrier.noname"),
        "barrier.noname",
        "operations",
        by_rank(odd, "barrier", "allreduce"),
    )
    hvd.barrier()


def case_each_ranks_value_is_listed() -> None:
    rank, size = hvd.rank(), hvd.size()
    if size > 2:
        disagree(
            lambda: hvd.allreduce(ones(rank // 2, 7), name="stairs"),
            "stairs",
            "shapes",
            {r: f"[{r // 2}, 7]" for r in range(size)},
        )
    disagree(
        lambda: hvd.broadcast(ones(3), rank, name="roots"),
        "roots",
        "root ranks",
        {r: f"root {r}" for r in range(size)},
    )
    dtypes = ["int8", "bool", "float64", "uint16"]
    disagree(
        lambda: hvd.allgather(ones(rank, dtype=dtypes[rank]), name="types"),
        "types",
        "data types",
        {r: dtypes[r] for r in range(size)},
    )


def case_a_mismatch_writes_nothing() -> None:
    rank = hvd.rank()
    group = [np.full(3, 10.0 + rank), np.full(4 + (rank == 0), 20.0 + rank)]
    with pytest.raises(errors.MismatchError):
        hvd.grouped_allreduce_(group, name="nothing")
    assert (group[0] == 10 + rank).all()
    assert (group[1] == 20 + rank).all()
    mine = np.full(3 + rank, 30 + rank)
    with pytest.raises(errors.MismatchError):
        hvd.broadcast_(mine, 0, name="nothing")
    assert (mine == 30 + rank).all()


def case_a_mismatch_fails_its_tensor_alone() -> None:
    rank, size = hvd.rank(), hvd.size()
    for turn in range(5):
        starts: dict[str, Callable[[], int]] = {
            f"good.{i}": lambda i=i: hvd.allreduce_async(
                np.full(50, i + rank), op=hvd.Max, name=f"good.{i}"
            )
            for i in range(10)
        }
        for i in range(3):
            starts[f"bad.{i}"] = lambda i=i: hvd.allreduce_async(
                ones(2 + (rank == i % size)), name=f"bad.{i}"
            )
        order = list(starts)
        random.Random(mpirun.seed() + turn + rank).shuffle(order)
        handles = {name: starts[name]() for name in order}
        for name in starts:
            if name.startswith("good"):
                result = hvd.synchronize(handles[name])
                assert (result == int(name[5:]) + size - 1).all()
            else:
                with pytest.raises(errors.MismatchError, match=f"'{name}'"):
                    hvd.synchronize(handles[name])
                with pytest.raises(ValueError, match="there is no handle"):
                    hvd.synchronize(handles[name])  # its error has released it


def case_unnamed_calls_that_differ_name_their_number() -> None:
    odd = hvd.size() - 1
    with pytest.raises(errors.MismatchError, match=r"'allreduce\.noname\.\d+'") as caught:
        hvd.allreduce(ones(2 if hvd.rank() == odd else 1))
    assert values_by_rank(str(caught.value)) == by_rank(odd, "[1]", "[2]")
    assert hvd.allreduce(ones(2)).tolist() == [1, 1]


def case_shutdown() -> None:
    hvd.shutdown()


test_case = session.on_ranks(globals(), 2, 3, 4, session="numpy")


# ---------------------------------------------------------------------------------------------
# Missing ranks. Signs are files, because the library is under test.


class Signs:
    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def give(self, sign: str) -> None:
        (self.folder / sign).touch()

    def wait(self, sign: str) -> None:
        deadline = time.monotonic() + 30
        while not (self.folder / sign).exists():
            assert time.monotonic() < deadline, f"{sign} was not given"
            time.sleep(0.002)


def _stall(signs: Signs, missing: list[int]) -> None:
    """The missing ranks come after the others have failed."""
    rank = hvd.rank()
    told: list[str] = []
    hvd.barrier()
    if rank in missing:
        for peer in set(range(hvd.size())) - set(missing):
            signs.wait(f"failed.{peer}")
    else:
        handles = [
            hvd.allreduce_async(ones(3), name="forgotten"),
            hvd.broadcast_async(ones(3), 0, name="also forgotten"),
        ]
        for handle in handles:
            with pytest.raises(errors.StalledError) as caught:
                hvd.synchronize(handle)
            assert isinstance(caught.value, errors.HororingInternalError)
            told.append(str(caught.value))
        signs.give(f"failed.{rank}")
    with pytest.raises(errors.StalledError) as caught:  # every later call fails
        hvd.allreduce(ones(3), name="forgotten")
    told.append(str(caught.value))
    hvd.shutdown()
    print("TOLD " + json.dumps(told), flush=True)
    # mpirun ends the job as soon as one rank ends without MPI_Finalize.
    signs.give(f"done.{rank}")
    for peer in range(hvd.size()):
        signs.wait(f"done.{peer}")


def _late(signs: Signs, missing: list[int]) -> None:
    """The missing ranks come after rank 0 has got the warning."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waited up to" in record.getMessage():
                signs.give("warned")

    logging.getLogger("hororing").addHandler(Handler())
    if hvd.rank() in missing:
        signs.wait("warned")
    assert hvd.allreduce(ones(3), name="late", op=hvd.Sum).tolist() == [hvd.size()] * 3
    hvd.barrier()
    print("TOLD []", flush=True)
    hvd.shutdown()


def _told(job: mpirun.Job) -> list[list[str]]:
    told = [re.findall(r"^TOLD (.*)$", output, re.MULTILINE) for output in job.outputs]
    assert all(len(each) == 1 for each in told), job.report()
    return [json.loads(each[0]) for each in told]


@pytest.mark.parametrize(
    ("size", "missing", "transport"),
    tiers.choose(
        [(2, [0], "auto"), (2, [1], "mpi"), (3, [1], "auto"), (4, [0, 2, 3], "auto")],
        push=[(2, [1], "mpi"), (4, [0, 2, 3], "auto")],
    ),
)
def test_a_rank_that_never_submits_is_named_and_fails_all(
    size: int, missing: list[int], transport: str, tmp_path: Path
):
    job = mpirun.run(
        __file__,
        size,
        "stall",
        str(tmp_path),
        json.dumps(missing),
        timeout_s=60,
        environment={
            "HORORING_STALL_WARNING_S": "0.3",
            "HORORING_STALL_SHUTDOWN_S": "1.2",
            "HORORING_TRANSPORT": transport,
        },
    )
    submitted = [rank for rank in range(size) if rank not in missing]
    # "missing ranks 0,2,3" or "missing rank 1"
    wanted = rf"submitted by {_pattern(submitted)}, missing {_pattern(missing)}\b"
    for told in _told(job):
        for text in told:
            assert re.search(wanted, text), text
            assert "stalled for more than 1 s" in text
            # The other request may be slightly younger than the limit.
            assert "allreduce 'forgotten'" in text
    warnings = [line for line in job.outputs[0].splitlines() if "waited up to" in line]
    assert all("WARNING" in line and "[rank 0]" in line for line in warnings)
    assert any("allreduce 'forgotten'" in line and re.search(wanted, line) for line in warnings), (
        job.report()
    )


def _pattern(ranks: list[int]) -> str:
    return {"[0]": "rank 0", "[1]": "rank 1", "[0, 2]": "ranks 0,2", "[0, 2, 3]": "ranks 0,2,3"}[
        str(ranks)
    ]


def test_a_rank_that_is_late_causes_a_warning_and_no_error(tmp_path: Path):
    job = mpirun.run(
        __file__,
        3,
        "late",
        str(tmp_path),
        "[1, 2]",
        timeout_s=60,
        environment={"HORORING_STALL_WARNING_S": "0.2", "HORORING_STALL_SHUTDOWN_S": "0"},
    )
    assert _told(job) == [[]] * 3
    assert job.returncode == 0, job.report()
    assert "allreduce 'late': submitted by rank 0, missing ranks 1,2." in job.outputs[0]


if __name__ == "__main__":
    hvd.init()
    {"stall": _stall, "late": _late}[sys.argv[1]](Signs(sys.argv[2]), json.loads(sys.argv[3]))
