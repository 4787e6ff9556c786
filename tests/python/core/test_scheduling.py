"""What is reduced together, and when; statistics."""

from __future__ import annotations

import random
import time

import mpirun
import numpy as np
import pytest
import session
from configured import engine

import hororing.numpy as hvd


def compute(seconds: float) -> None:
    """Compute for as long as a backward pass."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def gradients(step: int, names: list[str], rank: int) -> dict[str, np.ndarray]:
    """Return integers, whose sums are exact in any order."""
    draw = np.random.default_rng([mpirun.seed(), step, rank])
    return {
        name: draw.integers(-1000, 1000, 10 + 700 * i).astype(np.float32)
        for i, name in enumerate(names)
    }


def reduce_step(step: int, names: list[str]) -> None:
    """Make a step, and check it against NumPy; every rank submits in its own order."""
    mine = gradients(step, names, hvd.rank())
    order = list(names)
    random.Random(step * 100 + hvd.rank()).shuffle(order)
    handles = {name: hvd.allreduce_async(mine[name], name=name, op=hvd.Sum) for name in order}
    everywhere = [gradients(step, names, rank) for rank in range(hvd.size())]
    for name, handle in handles.items():
        expected = sum(each[name] for each in everywhere)
        np.testing.assert_array_equal(hvd.synchronize(handle), expected, err_msg=name)


def case_every_rule_gives_the_same_results():
    names = [f"layer{i}" for i in range(12)]
    for knobs in (
        {},
        {"CYCLE_TIME_MS": 0},
        {"FUSION_BYTES": "4KiB"},
        {"FUSION_BYTES": "0"},
        {"CACHE_CAPACITY": 4},
        {"BACKEND": "host"},
        {"REPRODUCIBLE": 1, "BACKEND": "host"},
    ):
        with engine(**knobs):
            for step in range(40):
                # Sometimes a tensor is missing, or there is a new one.
                missing = step % 13 == 12
                more = ["more"] if step % 17 == 16 else []
                reduce_step(step, names[: -1 if missing else None] + more)


def case_statistics_count_what_was_done():
    with engine(SPIN_US=0):  # every sum is negotiated
        before = hvd.statistics()
        for _ in range(3):
            hvd.allreduce(np.zeros(1000, np.float32), name="x")
        hvd.allgather(np.zeros(10, np.float32))
        after = hvd.statistics()
        assert after["submitted"] - before["submitted"] == 4
        assert after["completed"] - before["completed"] == 4
        assert after["bytes"] - before["bytes"] == 12040
        assert after["cache_hits"] - before["cache_hits"] == 2
        assert all(after.pop(name) == {} for name in ("groups", "compression", "guard"))
        assert all(isinstance(each, int) for each in after.values())
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.statistics()


def case_tensors_of_five_dtypes_are_one_batch_with_the_bits_of_five():
    dtypes = (np.float32, np.int64, np.float16, np.float64, np.uint8)
    with engine(SPIN_US=0):  # every sum is negotiated
        draw = np.random.default_rng([11, hvd.rank()])
        tensors = [(9 * draw.random(i % 70)).astype(dtypes[i % 5]) for i in range(200)]
        before = hvd.statistics()["batches"]
        sums = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="mixed")
        rows = hvd.grouped_allgather(tensors, name="mixed rows")
        assert hvd.statistics()["batches"] - before == 2
        for first in range(5):
            expected = hvd.grouped_allreduce(tensors[first::5], op=hvd.Sum, name=f"one {first}")
            for of_all, alone in zip(sums[first::5], expected, strict=True):
                np.testing.assert_array_equal(of_all, alone, strict=True)
            expected = hvd.grouped_allgather(tensors[first::5], name=f"rows {first}")
            for of_all, alone in zip(rows[first::5], expected, strict=True):
                np.testing.assert_array_equal(of_all, alone, strict=True)


def messages_and_batches() -> np.ndarray:
    now = hvd.statistics()
    return np.array([now[f"control_messages_{way}"] for way in ("sent", "received")]
                    + [now["batches"]])  # fmt: skip


def case_a_batch_costs_one_message_each_way_whatever_the_number_of_tensors():
    # Every sum is negotiated, and a rank that waits for long reports nothing more.
    with engine(SPIN_US=0, DEADLOCK_S=0):
        peers = hvd.size() - 1 if hvd.rank() == 0 else 1
        for count in (1, 10, 1000):
            tensors = [np.ones(8, np.float32) for _ in range(count)]
            names = [f"{count}.{i}" for i in range(count)]

            def step(tensors=tensors, names=names) -> None:
                hvd.grouped_allreduce(tensors, name="one of many " + names[0])

            step()
            before = messages_and_batches()
            for _ in range(10):
                step()
            sent, received, batches = messages_and_batches() - before
            assert batches == 10
            assert sent == 10 * peers, (count, sent)
            # Peers may already be in their next call.
            assert abs(received - 10 * peers) <= peers, (count, received)
            hvd.barrier()


def reports_beyond_batches(count: int, pause: float, kind: str) -> tuple[float, int]:
    """Return a rank's reports minus batches, and the batches, of a step of `count` tensors."""
    tensors = [np.ones(8, np.float32) for _ in range(count)]
    before = messages_and_batches()
    handles = []
    for i, tensor in enumerate(tensors):
        compute(pause)
        handles.append(hvd.allreduce_async_(tensor, op=hvd.Max, name=f"{kind}.{i}"))
    for handle in handles:
        hvd.synchronize(handle)
    sent, received, batches = messages_and_batches() - before
    hvd.barrier()
    told = received / (hvd.size() - 1) if hvd.rank() == 0 else sent
    return told - batches, batches


def case_a_batch_costs_one_report_however_its_tensors_come():
    """In a burst or in parts; with one more report at the end for the waiting caller."""
    # The median ignores steps in which a rank has lost its core.
    with engine(CYCLE_TIME_MS=4):
        for pause, kind in ((0.0, "burst"), (50e-6, "trickle")):
            steps = [reports_beyond_batches(400, pause, kind) for _ in range(10)][1:]
            assert all(batches < 50 for _, batches in steps), (kind, steps)
            assert sorted(beyond for beyond, _ in steps)[4] <= 1, (kind, steps)


def case_what_is_polled_for_does_not_wait_for_more():
    with engine(CYCLE_TIME_MS=10000):
        for _ in range(3):
            handle = hvd.allreduce_async(np.ones(3, np.float32), op=hvd.Sum, name="polled")
            begin = time.monotonic()
            while not hvd.poll(handle):
                assert time.monotonic() - begin < 5  # reports would be 10 apart
                time.sleep(1e-4)
            np.testing.assert_array_equal(hvd.synchronize(handle), [hvd.size()] * 3)


test_scheduling = session.on_ranks(globals(), 2, 3, session="numpy")
