"""Shards and exact evaluation, by arithmetic and on 1 to 4 ranks, without a framework."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mpirun
import numpy as np
import pytest
import session
from hypothesis import given, settings
from hypothesis import strategies as st

import hororing.numpy as hvd
from hororing.errors import MismatchError, NotInitializedError
from hororing.toolkit.data.evaluation import (
    Total,
    Totals,
    evaluate_checkpoints,
    masked_arrays,
    masked_batches,
)
from hororing.toolkit.data.sharding import REMAINDERS, Shard, permutation

N = 1797  # the digits of scikit-learn


def answers(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which samples a model classifies correctly, and its losses."""
    rng = np.random.default_rng(seed)
    return rng.random(N) < 0.9, rng.exponential(0.3, N)


def evaluated(rank: int, size: int, batch: int, right: np.ndarray, loss: np.ndarray) -> Totals:
    """Return the totals of one rank. Padding that counts would make them wrong."""
    totals = Totals(["correct", "loss"])
    for hits, losses, mask in masked_arrays((right, loss), batch, rank, size):
        assert len(hits) == batch
        totals.add("correct", hits | ~mask, mask)
        totals.add("loss", np.where(mask, losses, np.nan), mask)
    return totals


# -- evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 8))
def test_every_sample_counts_once_for_every_size_and_batch(size: int) -> None:
    for batch in range(1, 101):
        ranks = [list(masked_batches(N, batch, rank, size)) for rank in range(size)]
        assert {len(batches) for batches in ranks} == {math.ceil(math.ceil(N / size) / batch)}
        counted = [indices[mask] for batches in ranks for indices, mask in batches]
        assert all(len(indices) == batch for batches in ranks for indices, _ in batches)
        np.testing.assert_array_equal(np.sort(np.concatenate(counted)), np.arange(N))


def test_the_numbers_of_imagenet() -> None:
    for batch, padded in ((20, 51_200), (115, 58_880)):
        batches = [len(list(masked_batches(50_000, batch, rank, 128))) for rank in (0, 127)]
        assert [each * batch * 128 for each in batches] == [padded, padded]


def test_fewer_samples_than_ranks_and_none() -> None:
    counted = [list(masked_batches(2, 4, rank, 3)) for rank in range(3)]
    assert [int(mask.sum()) for ((_, mask),) in counted] == [1, 1, 0]
    assert list(masked_batches(0, 4, 0, 3)) == []


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_what_others_do_is_something_else(size: int) -> None:
    right, _ = answers(5)
    repeated = np.resize(np.arange(N), -(-N // size) * size)  # torch's DistributedSampler
    shards = [right[repeated[rank::size]] for rank in range(size)]
    batches = [part for each in shards for part in np.array_split(each, range(32, len(each), 32))]
    if N % size:
        assert sum(map(len, shards)) > N
        assert sum(map(np.sum, shards)) != right.sum()
    assert np.mean([part.mean() for part in batches]) != right.mean()


def test_wrong_values_and_masks_are_refused() -> None:
    totals = Totals(["a"])
    with pytest.raises(ValueError, match="metric 'a' is one number for a batch"):
        totals.add("a", 0.5)
    for mask in (np.ones(3), np.ones(2, bool), np.ones((3, 1), bool)):
        with pytest.raises(ValueError, match=r"metric 'a': values of shape .3,. need a mask"):
            totals.add("a", np.zeros(3), mask)
    for bad in ((3, 0, 0, 1), (-1, 2, 0, 1), (3, 2, 2, 2), (3, 2, -1, 2)):
        with pytest.raises(ValueError, match="masked_batches: samples="):
            masked_batches(*bad)
    with pytest.raises(ValueError, match="rank and size, or neither"):
        masked_batches(3, 1, rank=0)
    with pytest.raises(ValueError, match=r"lengths differ: \[3, 4\]"):
        masked_arrays((np.zeros(3), np.zeros(4)), 1, 0, 1)


def case_before_init() -> None:
    for call in (lambda: Shard(10), lambda: masked_batches(10, 2), Totals(["a"]).reduced):
        with pytest.raises(NotInitializedError, match="init"):
            call()
    hvd.init()


def case_counts_are_those_of_one_process() -> None:
    right, loss = answers(mpirun.seed())
    drawn = np.random.default_rng(mpirun.seed()).integers(1, 101, 4).tolist()
    for batch in {1, 7, 32, 100, *drawn}:
        results = evaluated(hvd.rank(), hvd.size(), batch, right, loss).reduced()
        assert results["correct"] == Total(int(right.sum()), N)
        assert type(results["correct"].total) is int
        assert results["correct"].mean == right.mean()
        assert results["loss"].count == N
        assert abs(results["loss"].total - loss.sum()) <= 1e-12 * loss.sum()
        assert len({repr(each) for each in hvd.allgather_object(results)}) == 1


def case_ranks_without_batches_and_values_of_several_dimensions() -> None:
    totals = Totals(["tokens", "loss"])
    if hvd.rank() == 0:
        totals.add("tokens", np.ones((3, 5), np.uint8), np.array([True, False, True]))
        totals.add("loss", np.full((2, 2), 0.5, np.float16))
    assert totals.reduced() == {"tokens": Total(10, 10), "loss": Total(2.0, 4)}
    with pytest.raises(ValueError, match="metric 'nothing' has no values on any rank"):
        Totals(["nothing"]).reduced()


def case_ranks_with_different_metrics_are_told() -> None:
    if hvd.size() == 1:
        return
    mine = "loss" if hvd.rank() else "correct"
    with pytest.raises(ValueError, match="different metrics: rank 0: correct; rank 1: loss"):
        Totals([mine]).reduced()
    with pytest.raises(MismatchError, match=r"evaluation\.counts"):
        Totals(["loss", "correct"][: 1 + hvd.rank() % 2]).reduced()


def case_checkpoints_offline() -> None:
    right, loss = answers(mpirun.seed())
    evaluations = []

    def evaluate(path: str) -> dict[str, Total]:
        evaluations.append(path)
        return evaluated(hvd.rank(), hvd.size(), 32, right, loss * float(path)).reduced()

    own = tempfile.mkdtemp() if hvd.rank() == 0 else ""
    output = Path(hvd.broadcast_object(own), "results.jsonl")
    first = evaluate_checkpoints(["1", "2"], evaluate, output)
    if hvd.rank() == 0:
        with output.open("a") as file:
            file.write('{"checkpoint": "3", "loss": {"tot')  # a process was killed here
    again = evaluate_checkpoints(["2", "3"] if hvd.rank() == 0 else [], evaluate, output)
    assert evaluations == ["1", "2", "3"]
    assert again["2"] == first["2"]
    assert again["3"]["correct"] == Total(int(right.sum()), N)
    if hvd.rank() == 0:
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        assert [line["checkpoint"] for line in lines] == ["1", "2", "3"]
        assert lines[0]["correct"]["mean"] == right.mean()
    for _ in range(2):  # from the evaluation, and from the file
        nan = evaluate_checkpoints(["nan"], evaluate, output)["nan"]["loss"]
        assert np.isnan(nan.total)
        assert nan.count == N
    if hvd.rank() == 0:
        assert "NaN" not in output.read_text()  # which JSON does not have
    with pytest.raises(TypeError, match=r"evaluate\('4'\) must return .* of Totals, not 0.5"):
        evaluate_checkpoints(["4"], lambda path: 0.5, output)  # type: ignore[arg-type, return-value]
    hvd.barrier()


def case_results_that_cannot_be_read_or_written_are_an_error_on_every_rank() -> None:
    def not_called(path: str) -> dict[str, Total]:
        raise AssertionError(path)

    own = tempfile.mkdtemp() if hvd.rank() == 0 else ""
    folder = Path(hvd.broadcast_object(own))
    for content, text in (
        ('{"checkpoint": "1"}\n{"loss": 3}\n', "line 2 of .* is not a result"),
        ('{"lr": 1}', "holds no results"),
        (b"\x80\x02weights", "holds no results"),
    ):
        content = content if isinstance(content, bytes) else content.encode()
        if hvd.rank() == 0:
            (folder / "file").write_bytes(content)
        with pytest.raises(ValueError, match=text):
            evaluate_checkpoints(["1"], not_called, folder / "file")
        assert hvd.rank() > 0 or (folder / "file").read_bytes() == content
    with pytest.raises(FileNotFoundError, match="none"):
        evaluate_checkpoints(["1"], not_called, folder / "none" / "file")
    hvd.barrier()


SCRIPT = """
from pathlib import Path
import numpy as np
from hororing.toolkit.data.evaluation import Totals, masked_arrays
from neighbour import COUNT

def evaluate_one(path):
    totals = Totals(["correct"])
    for hits, mask in masked_arrays([np.arange(COUNT) < int(Path(path).read_text())], 4):
        totals.add("correct", hits, mask)
    return totals.reduced()
"""


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "neighbour.py").write_text("COUNT = 10")
    for name, text in (("src/eval.py", SCRIPT), ("1.txt", "3"), ("2.txt", "5")):
        (tmp_path / name).write_text(text)

    def evaluate(function: str) -> Any:
        return subprocess.run(
            [sys.executable, "-m", "hororing", "evaluate", function, "1.txt", "2.txt",
             "--output", "results.jsonl"],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip

    for _ in range(2):
        job = evaluate("src/eval.py:evaluate_one")
        assert job.stdout == "1.txt: correct 0.3\n2.txt: correct 0.5\n", job.stderr
        assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2
    for function, why in (
        ("src/eval.py:nothing", "'nothing'"), ("evil:evaluate", "No module named 'evil'"),
        ("src/eval.py", "write module:name or file.py:name"), ("src/eval.py:SCRIPT", "SCRIPT"),
    ):  # fmt: skip
        job = evaluate(function)
        assert job.returncode == 2
        assert f"cannot find {function!r}: " in job.stderr
        assert why in job.stderr


# -- shards ---------------------------------------------------------------------------------------


def test_permutations_are_what_they_were() -> None:
    """Index files and resumed runs depend on them."""
    assert permutation(10, seed=0, epoch=0).tolist() == PINNED[0]
    assert permutation(10, seed=7, epoch=3).tolist() == PINNED[1]
    orders = {tuple(permutation(50, seed=s, epoch=e)) for s in range(5) for e in range(5)}
    assert len(orders) == 25
    firsts = np.bincount([permutation(4, seed=1, epoch=e)[0] for e in range(2000)])
    assert firsts.min() > 400  # 500 are expected; the standard deviation is 20


PINNED = [[0, 8, 9, 3, 7, 5, 1, 2, 6, 4], [7, 1, 9, 6, 0, 4, 2, 8, 3, 5]]


@settings(max_examples=60)
@given(
    st.integers(1, 60), st.integers(1, 7), st.integers(0, 9), st.sampled_from(REMAINDERS),
    st.booleans(),
)  # fmt: skip
def test_shards_are_equal_disjoint_and_complete(
    samples: int, size: int, epoch: int, remainder: str, shuffle: bool
) -> None:
    if remainder == "drop" and samples < size:
        with pytest.raises(ValueError, match='use remainder="repeat"'):
            len(Shard(samples, 0, size))
        return
    shards = [
        Shard(samples, rank, size, seed=3, remainder=remainder, shuffle=shuffle)
        for rank in range(size)
    ]
    for shard in shards:
        shard.set_epoch(epoch)
    together = np.concatenate([shard.indices() for shard in shards])
    lengths = {len(shard) for shard in shards}
    counts = np.bincount(together, minlength=samples)
    if remainder == "drop":
        assert lengths == {samples // size}
        assert counts.max() == 1
    elif remainder == "repeat":
        assert lengths == {-(-samples // size)}
        assert counts.min() >= 1
        assert counts.sum() - samples < size
    else:
        assert max(lengths) - min(lengths) <= 1
        assert counts.tolist() == [1] * samples
    order = permutation(samples, seed=3, epoch=epoch) if shuffle else np.arange(samples)
    steps = np.stack([shard.indices()[: samples // size] for shard in shards], 1).ravel()
    np.testing.assert_array_equal(steps, order[: len(steps)])  # whatever the number of processes


def test_an_epoch_goes_on_with_another_number_of_processes() -> None:
    shards = [Shard(103, rank, 4, seed=1, remainder="uneven") for rank in range(4)]
    seen: list[int] = []
    for shard in shards:
        shard.set_epoch(2)
        for batch in range(2):
            seen += shard.indices()[batch * 8 : batch * 8 + 8].tolist()
            shard.record_batch(batch, 8)
        assert len(shard) == len(shard.indices()) - 16
    states = [shard.state_dict() for shard in shards]
    rest = [Shard(103, rank, 3, remainder="uneven") for rank in range(3)]
    for shard in rest:
        shard.load_state_dict(states[0])
        shard.merge(states[1:])
        assert shard.epoch == 2
        seen += list(shard)
    assert sorted(seen) == list(range(103))
    rest[0].record(rest[0])
    assert list(rest[0]) == []
    rest[0].set_epoch(3)
    np.testing.assert_array_equal(rest[0].indices(), permutation(103, seed=1, epoch=3)[::3])


def test_wrong_arguments_of_shards() -> None:
    for options, why in (
        ({"remainder": "wrap"}, "remainder='wrap' is not one of"),
        ({"seed": -1}, "seed=-1 must be an integer"),
        ({"size": None}, "rank and size, or neither"),
        ({"rank": 2}, "no rank 2 among 2"),
    ):
        with pytest.raises(ValueError, match=why):
            Shard(10, **{"rank": 0, "size": 2, **options})
    shard = Shard(10, 0, 2)
    for batch, size in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"no batch {batch} of {size} samples among 5"):
            shard.record_batch(batch, size)
    with pytest.raises(ValueError, match=r"in \[0, 10\), not 3 to 10"):
        shard.record([3, 10])
    with pytest.raises(ValueError, match="of 11 samples, the shard of 10"):
        shard.load_state_dict(Shard(11, 0, 1).state_dict())
    with pytest.raises(ValueError, match=r"states differ in .samples, seed, epoch."):
        shard.merge([Shard(10, 0, 2, seed=4).state_dict()])


def case_shards_of_this_job_synchronize() -> None:
    shard = Shard(50, seed=mpirun.seed() % 1000, remainder="uneven")
    assert (shard.rank, shard.size) == (hvd.rank(), hvd.size())
    shard.record_batch(0, 3)
    mine = shard.indices()
    shard.synchronize()
    left = [index for part in hvd.allgather_object(list(shard)) for index in part]
    assert len(left) == len(set(left)) == 50 - 3 * hvd.size()
    shard.record_batch(1, 3)  # a loop over the share goes on
    np.testing.assert_array_equal(list(shard), mine[6:])
    if hvd.size() > 1:
        shard.set_epoch(hvd.rank() == 1)
        with pytest.raises(ValueError, match="states differ"):
            shard.synchronize()


test_case = session.on_ranks(globals(), 1, 2, 3, 4, session="numpy")
