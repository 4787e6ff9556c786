"""Small blocking sums by the one-shot exchange within a host: results, and when it is not used."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import mpirun
import numpy as np
import oracle
import pytest
import session
import tiers
from configured import engine

import hororing.numpy as hvd
from hororing import errors


def begin_together() -> None:
    """Bring all ranks within microseconds of one another; blocking calls keep them so."""
    hvd.barrier()


def counted(call: Callable[[], object], times: int = 1) -> tuple[int, int]:
    """Return the numbers of one-shot allreduces and of messages of this rank in these calls."""
    before = hvd.statistics()
    for _ in range(times):
        call()
    after = hvd.statistics()
    assert after["submitted"] - before["submitted"] == times
    assert after["completed"] - before["completed"] == times
    return tuple(after[name] - before[name]
                 for name in ("allreduces_at_once", "control_messages_sent"))  # type: ignore[return-value]  # fmt: skip


def case_calls_in_step_cost_no_message():
    with engine():
        data = np.ones(16, np.float32)
        hvd.allreduce_(data, op=hvd.Sum, name="x")
        for name in ("x", None):
            begin_together()
            met, sent = counted(lambda name=name: hvd.allreduce(data, name=name), 2000)
            if hvd.size() == 1:
                assert met == 0
            elif hvd.size() == 2:
                assert met > 0  # on an idle machine, most of them
            # If they did not meet, ranks had to report, and rank 0 to answer each of the others.
            assert sent <= (2000 - met) * max(1, hvd.size() - 1) + 2 * hvd.size()
            # All ranks have met in the same calls.
            assert len(set(hvd.allgather_object(met))) == 1


def case_every_type_and_operation():
    with engine():
        for name in [*oracle.FLOATS, "int32", "int64", "uint8"]:
            dtype = oracle.type_of(name)
            for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product):
                for shape in ((), (1,), (3, 5), (257,)):
                    values = [
                        np.random.default_rng([mpirun.seed(), rank]).integers(0, 4, shape)
                        for rank in range(hvd.size())
                    ]
                    mine = values[hvd.rank()].astype(dtype)
                    results = [hvd.allreduce(mine, op=op, name=f"{name}{op}{shape}")
                               for _ in range(3)]  # fmt: skip
                    wide = np.stack(values).astype(np.float64)
                    wanted = {
                        hvd.Sum: wide.sum(0), hvd.Average: wide.sum(0) / hvd.size(),
                        hvd.Min: wide.min(0), hvd.Max: wide.max(0), hvd.Product: wide.prod(0),
                    }[op]  # fmt: skip
                    if np.dtype(dtype).kind in "iu":
                        wanted = np.trunc(wanted)
                    for result in results:
                        assert result.dtype == dtype
                        assert result.shape == shape
                        # Division by 3 is rounded; sums of a few small numbers are exact.
                        rtol = 1e-2 if np.dtype(dtype).itemsize < 4 else 1e-6
                        np.testing.assert_allclose(result.astype(np.float64), wanted, rtol)


def case_the_same_bits_at_once_and_negotiated():
    rng = np.random.default_rng([mpirun.seed(), int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))])
    tensors = [rng.standard_normal(n).astype(np.float32) for n in (1, 7, 100, 1000, 4096)]

    def sums() -> list[bytes]:
        return [
            hvd.allreduce(tensor, name=f"t{number}.{prescale}", prescale_factor=prescale).tobytes()
            for number, tensor in enumerate(tensors)
            for prescale in (1.0, 0.3)
            for _ in range(5)
        ]

    with engine():
        at_once = sums()
    with engine(SPIN_US=0):
        negotiated = sums()
        assert hvd.statistics()["allreduces_at_once"] == 0
        assert hvd.allgather_object(at_once) == [at_once] * hvd.size()
    assert at_once == negotiated


def case_a_mismatch_is_an_error_everywhere_and_the_job_goes_on():
    with engine():
        if hvd.size() == 1:
            return
        for _ in range(20):
            begin_together()
            with pytest.raises(errors.MismatchError, match=r"'odd'.*shape"):
                hvd.allreduce(np.ones(3 + (hvd.rank() == 1), np.float32), name="odd")
            begin_together()
            op = hvd.Max if hvd.rank() == 1 else hvd.Sum
            with pytest.raises(errors.MismatchError, match="'odd'"):
                hvd.allreduce(np.ones(3, np.float32), op=op, name="odd")
            assert hvd.allreduce(np.ones(3), op=hvd.Sum, name="odd")[2] == hvd.size()


def case_late_ranks_and_asynchronous_ones_get_the_same():
    with engine():
        data = np.full(5, hvd.rank() + 1.0)
        total = hvd.size() * (hvd.size() + 1) / 2
        for step in range(60):
            if hvd.rank() == step % hvd.size():
                time.sleep(0.001)
            assert hvd.allreduce(data, op=hvd.Sum, name="late")[4] == total
        for step in range(60):
            if hvd.rank() == step % hvd.size():
                handle = hvd.allreduce_async(data, op=hvd.Sum, name="mixed")
                assert hvd.synchronize(handle)[4] == total
            else:
                assert hvd.allreduce(data, op=hvd.Sum, name="mixed")[4] == total


def case_threads_do_not_mix_up_their_sums():
    with engine():
        failed = []

        def work(thread: int) -> None:
            for step in range(200):
                result = hvd.allreduce(
                    np.full(3, 10.0 * thread + step), op=hvd.Sum, name=f"thread {thread}"
                )
                if result[0] != hvd.size() * (10 * thread + step):
                    failed.append((thread, step, result))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed


def case_a_rank_that_has_joined_contributes_nothing():
    with engine():
        last = hvd.size() - 1
        if hvd.rank() != last:
            for _ in range(50):
                assert hvd.allreduce(np.ones(2), op=hvd.Sum, name="uneven")[0] == max(last, 1)
        hvd.join()
        assert hvd.allreduce(np.ones(2), op=hvd.Sum, name="after")[0] == hvd.size()


def case_with_a_timeline_everything_is_in_it():
    folder = Path(tempfile.mkdtemp())
    with engine(TIMELINE=str(folder / "t.json")):
        for _ in range(10):
            hvd.allreduce(np.ones(4, np.float32), name="seen")
        assert hvd.statistics()["allreduces_at_once"] == 0
    if hvd_rank_is_0():
        events = json.loads((folder / "t.json").read_text())
        assert sum("ALLREDUCE" in str(event.get("name")) for event in events) >= 10


def hvd_rank_is_0() -> bool:
    """Return whether this is rank 0, without an engine."""
    return os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0"


test_case = session.on_ranks(globals(), 1, 2, 3, 4, session="numpy")


# ---------------------------------------------------------------------------------------------
# Ends


def again_and_again(times: float = math.inf) -> None:
    data = np.ones(4, np.float32)
    for _ in itertools.takewhile(lambda done: done < times, itertools.count()):
        hvd.allreduce(data, name="x")


def killed_in_the_middle() -> None:
    hvd.init()
    again_and_again(1000)
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(errors.PeerLostError, match="rank 1") as caught:
        again_and_again()
    print("told", flush=True)
    raise caught.value


def shut_down_in_the_middle() -> None:
    hvd.init()
    again_and_again(1000)
    if hvd.rank() == 1:
        hvd.shutdown()
        return
    with pytest.raises(errors.ShutDownError, match="rank 1 has shut down"):
        again_and_again()
    print("told", flush=True)


@pytest.mark.parametrize("size", tiers.choose([2, 3], push=[3]))
@pytest.mark.parametrize("end", ["killed_in_the_middle", "shut_down_in_the_middle"])
def test_the_others_are_told(end: str, size: int):
    job = mpirun.run(__file__, size, end, timeout_s=60)
    assert job.returncode is not None, job.report()
    assert (job.returncode == 0) == (end == "shut_down_in_the_middle"), job.report()
    told = ["told" in output for output in job.outputs]
    assert told[0] or end == "killed_in_the_middle", job.report()  # mpirun may end it before
    assert not told[1], job.report()


if __name__ == "__main__":
    import sys

    globals()[sys.argv[1]]()
