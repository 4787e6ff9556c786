"""HORORING_WIRE: sums of float32 that travel between hosts in 16 bits, over hosts of hosts.sh."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

import mpirun
import numpy as np
import pytest
from configured import engine
from numpy.typing import NDArray

import hororing.numpy as hvd

LAYOUTS = ["2,2", "1,2", "1,1,1"]
KINDS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # what a rounding is off at most, relatively


def arrays(elements: int, dtype: str = "float32") -> list[NDArray[np.floating]]:
    """What all ranks pass."""
    return [
        np.random.default_rng([mpirun.seed(), rank, elements]).normal(size=elements).astype(dtype)
        for rank in range(hvd.size())
    ]


def has_16_bits(values: NDArray[np.float32], kind: str) -> bool:
    if kind == "float16":
        return np.array_equal(values.astype(np.float16).astype(np.float32), values)
    return not np.any(values.view(np.uint32) & 0xFFFF)


def narrow_bytes() -> int:
    return hvd.statistics()["narrow_bytes"]


def sums_are_near(kind: str) -> None:
    """Of several sizes, and the same on all ranks. The large ones travelled narrow; a small one may
    go by recursive doubling, where that is the cheapest, and is full then.
    """
    for elements in (1025, 70_001, 1 << 20):
        passed = arrays(elements)
        before = narrow_bytes()
        average = hvd.allreduce(passed[hvd.rank()], op=hvd.Average, name=f"average {elements}")
        narrow = narrow_bytes() - before
        assert narrow == 4 * elements or (narrow == 0 and elements == 1025), (elements, narrow)
        assert has_16_bits(average, kind) == (narrow > 0)
        wide = np.array(passed, np.float64)
        allowed = 2.02 * KINDS[kind] * np.abs(wide).mean(0) + 1e-7
        assert np.all(np.abs(average - wide.mean(0)) <= allowed)
        assert set(hvd.allgather_object(average.tobytes())) == {average.tobytes()}


def case_sums_of_float32_travel_in_16_bits() -> None:
    for kind in KINDS:
        with engine(WIRE=kind):
            sums_are_near(kind)


def case_reproducible_sums_have_the_same_bits_alone_and_among_others() -> None:
    with engine(WIRE="bfloat16", REPRODUCIBLE=1):
        sums_are_near("bfloat16")
        passed = [arrays(elements)[hvd.rank()] for elements in (3, 50_000, 1 << 18)]
        together = hvd.grouped_allreduce(passed, op=hvd.Sum, name="together")
        for number, (mine, of_group) in enumerate(zip(passed, together, strict=True)):
            alone = hvd.allreduce(mine, op=hvd.Sum, name=f"alone {number}")
            np.testing.assert_array_equal(alone, of_group)


def case_nothing_else_is_rounded() -> None:
    with engine(WIRE="bfloat16"):
        for dtype, op in (("float64", hvd.Sum), ("float32", hvd.Max), ("float32", hvd.Min)):
            passed = arrays(10_000, dtype)
            combine = {hvd.Sum: np.sum, hvd.Max: np.max, hvd.Min: np.min}[op]
            result = hvd.allreduce(passed[hvd.rank()], op=op, name=f"{dtype} {op}")
            np.testing.assert_allclose(result, combine(np.array(passed), 0), rtol=0, atol=1e-12)
        passed = arrays(10_000)
        rows = hvd.allgather(passed[hvd.rank()], name="gather")
        np.testing.assert_array_equal(rows, np.concatenate(passed))
        # A count, or a loss: what fits into a packet gains nothing.
        assert hvd.allreduce(np.float32(16_777_215 * (hvd.rank() == 0)), op=hvd.Sum) == 16_777_215
        assert narrow_bytes() == 0


def case_autotune_tries_it_where_that_is_permitted() -> None:
    with engine():
        folder = Path(tempfile.mkdtemp() if hvd.rank() == 0 else ".")
    log = folder / "tried.csv"
    chosen = {"FUSION_BYTES": "64MiB", "CYCLE_TIME_MS": 1, "CHUNK_BYTES": "64KiB"}
    tuned = {"AUTOTUNE": 1, "AUTOTUNE_LOG": log, "AUTOTUNE_STEPS_PER_SAMPLE": 1} | chosen
    for wire in ("auto", "full"):
        with engine(**tuned, ALGORITHM="ring", WIRE=wire):
            passed = arrays(1 << 16)
            travelled = []
            for _ in range(30):
                before = narrow_bytes()
                result = hvd.allreduce(passed[hvd.rank()], op=hvd.Sum, name="gradient")
                travelled.append(narrow_bytes() - before)
                assert has_16_bits(result, "bfloat16") is (travelled[-1] > 0)
            assert set(map(tuple, hvd.allgather_object(travelled))) == {tuple(travelled)}
            assert travelled[0] == 0
            assert (1 << 18 in travelled) is (wire == "auto")
            assert len(set(travelled[-10:])) == 1  # settled
            if hvd.rank() != 0 or wire != "auto":
                continue
            rows = list(csv.DictReader(log.open()))
            assert rows[-1]["phase"] == "best"
            narrow = "full,bfloat16,full"  # 256 KiB are of the second class
            assert {row["wire"] for row in rows} == {"full", narrow}
            assert (rows[-1]["wire"] == narrow) is (travelled[-1] > 0)
            assert {row["wire"] for row in rows if row["phase"] == "warmup"} == {"full"}


# ---------------------------------------------------------------------------------------------
# The tests

needs_hosts = pytest.mark.skipif(bool(mpirun.why_no_hosts()), reason=mpirun.why_no_hosts())


@needs_hosts
@pytest.mark.parametrize("case", mpirun.case_names(globals()))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_wire(case: str, layout: str) -> None:
    mpirun.cases_of(__file__, sum(map(int, layout.split(","))), layout).check(case)


# What a rank sends of 256 KiB takes 210 ms there, and half of it 105: more than anything else does.
@needs_hosts
def test_autotune_takes_it_where_the_wire_is_slow(tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(
        "import numpy as np\nimport hororing.numpy as hvd\n"
        "hvd.init()\n"
        "for _ in range(20):\n"
        "    before = hvd.statistics()['narrow_bytes']\n"
        "    hvd.allreduce(np.ones(1 << 16, np.float32), name='gradient')\n"
        "print('narrow', hvd.statistics()['narrow_bytes'] - before)\n"
    )
    fixed = {"FUSION_BYTES": "64MiB", "CYCLE_TIME_MS": 1, "CHUNK_BYTES": "64KiB"}
    knobs = {"AUTOTUNE": 1, "AUTOTUNE_STEPS_PER_SAMPLE": 1, "ALGORITHM": "ring", "WIRE": "auto"}
    environment = {f"HORORING_{name}": str(value) for name, value in (fixed | knobs).items()}
    job = mpirun.run(script, 2, hosts="1,1 -r 10mbit", environment=environment)
    for text in job.outputs:
        assert "narrow 262144" in text, job.report()


@needs_hosts
def test_what_cannot_be_narrow_is_refused_on_every_rank(tmp_path: Path) -> None:
    script = tmp_path / "init.py"
    script.write_text(
        "import os\nimport hororing.numpy as hvd\n"
        "def told(**knobs):\n"
        "    os.environ.update({f'HORORING_{name}': text for name, text in knobs.items()})\n"
        "    try:\n        hvd.init()\n"
        "    except ValueError as error:\n        print('ValueError', error)\n"
        "    for name in knobs:\n        del os.environ[f'HORORING_{name}']\n"
        "told(WIRE='bfloat16', ALGORITHM='recursive_doubling')\n"
        "told(WIRE='full,bfloat16,float16', REPRODUCIBLE='1')\n"
        "told(WIRE='float16', GPU='nccl')\n"
        "told(WIRE='auto')\n"
        "told(WIRE='auto', AUTOTUNE='1', REPRODUCIBLE='1')\n"
    )
    words = [
        "HORORING_ALGORITHM=recursive_doubling",
        "HORORING_REPRODUCIBLE=1",
        "HORORING_GPU=staged",
        "HORORING_AUTOTUNE=1",
        "HORORING_REPRODUCIBLE=1",
    ]
    job = mpirun.run(script, 2, hosts="1,1")
    for text in job.outputs:
        told = [line for line in text.splitlines() if line.startswith("ValueError")]
        assert len(told) == len(words), job.report()
        for line, word in zip(told, words, strict=True):
            assert "HORORING_WIRE=" in line
            assert word in line
