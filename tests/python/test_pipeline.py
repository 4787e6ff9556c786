"""The input pipeline: order, errors, ends of processes; no framework, no ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hororing._core import ffi, lib
from hororing.data import ring
from hororing.data.pipeline import Pipeline, StageError, WorkerLostError

DEADLINE_S = 20


def children(pid: int | str = "self") -> list[int]:
    """Processes that a process has started, zombies aside."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return [child for child in found if alive(child)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def chain() -> Iterator[Pipeline]:
    """Two lanes of two stages; the second one fails on 13 and refuses 14."""

    def read(item: int) -> dict[str, Any]:
        return {
            "item": item,
            "image": np.full((3, 5, item % 7), item % 200, np.uint8),
            "more": (np.arange(item, dtype=np.float64)[::2], "text", None),
        }

    def decode(read: dict[str, Any]) -> dict[str, Any]:
        if read["item"] == 13:
            raise KeyError("thirteen")
        if read["item"] == 14:

            class Local(Exception):
                def __reduce__(self) -> Any:
                    raise TypeError("no")

            raise Local("fourteen")
        if read["item"] == 15:
            return {"image": np.zeros(100_000)}
        return {**read, "decoded": read["image"] + 1}

    with Pipeline(read, decode, lanes=2, slots=4, slot_bytes=1 << 14) as pipeline:
        yield pipeline


def check(result: dict[str, Any], item: int) -> None:
    assert result["item"] == item
    np.testing.assert_array_equal(
        result["decoded"], np.full((3, 5, item % 7), item % 200 + 1, np.uint8)
    )
    np.testing.assert_array_equal(result["more"][0], np.arange(0.0, item, 2))
    assert result["more"][1:] == ("text", None)


@pytest.mark.parametrize("held", [0, 1, 3])
def test_results_come_in_order(chain: Pipeline, held: int) -> None:
    for items in ([], [5], list(range(100, 141))):
        kept = []
        for item, result in zip(items, chain(items, held=held), strict=True):
            check(result, item)
            result["decoded"][...] += 0  # writable
            kept = [*kept, (result, item)][-held:]  # all of them, where held is 0
            for earlier, number in kept:
                check(earlier, number)


def test_results_of_their_own_stay(chain: Pipeline) -> None:
    for item, result in enumerate(list(chain(range(12)))):
        check(result, item)


def test_an_epoch_that_is_left_is_dropped(chain: Pipeline) -> None:
    for _ in chain(range(1000, 2000)):
        break
    left = chain(range(3000, 3100))
    next(left)
    for item, result in enumerate(chain(range(9))):
        check(result, item)
    with pytest.raises(RuntimeError, match="another epoch of this Pipeline has begun"):
        next(left)


def test_errors_of_stages_are_raised_with_their_traceback(chain: Pipeline) -> None:
    for held in (0, 1):
        results = chain([11, 12, 13, 16], held=held)
        check(next(results), 11)
        check(next(results), 12)
        with pytest.raises(StageError, match=r"stage 2 'decode' failed on .*'item': 13") as caught:
            next(results)
        assert 'raise KeyError("thirteen")' in str(caught.value)
        assert repr(caught.value.__cause__) == "KeyError('thirteen')"
    with pytest.raises(StageError, match=r"(?s)stage 2 .*fourteen") as caught:
        list(chain([14]))
    assert caught.value.__cause__ is None
    with pytest.raises(
        StageError, match=r"item of 8.* bytes does not fit into slots of 16384; pass"
    ):
        list(chain([15]))
    for item, result in enumerate(chain(range(5))):
        check(result, item)


def test_stages_overlap() -> None:
    def stage(item: int) -> int:
        time.sleep(0.03)
        return item

    with Pipeline(stage, stage) as pipeline:
        list(pipeline(range(2)))  # the processes are there
        begin = time.monotonic()
        for _ in pipeline(range(30)):
            time.sleep(0.03)
        assert time.monotonic() - begin < 0.85 * 30 * 0.09


def test_a_killed_process_is_told_of() -> None:
    before = children()
    pipeline = Pipeline(lambda item: item, lambda item: item, slots=2)
    victim = pipeline._lanes[0].workers[0].pid
    results = pipeline(range(10**6))
    next(results)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match=f"stage 1 .*pid {victim}. was killed by SIGKILL"):
        list(results)
    until(lambda: children() == before)
    with pytest.raises(RuntimeError, match="was closed; make another one"):
        pipeline([1])
    with (
        Pipeline(lambda item: os._exit(7)) as pipeline,
        pytest.raises(WorkerLostError, match=r"stage 1 .* ended with 7"),
    ):
        list(pipeline([1]))


def test_a_stage_that_hangs_ends_the_wait() -> None:
    with (
        Pipeline(lambda item: time.sleep(3600), timeout_s=1.5) as pipeline,
        pytest.raises(WorkerLostError, match=r"nothing came out of stage 1 .* for 1.5 s"),
    ):
        list(pipeline([1]))


SCRIPT = """
import signal, sys, time
from hororing.data.pipeline import Pipeline

signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs the tests may ignore it

class Mine:  # of the main module
    def __init__(self, item): self.item = item

def read(item):
    return Mine(item)

def wait(mine):
    if mine.item == 3:
        time.sleep(3600)
    return mine.item

for item in Pipeline(read, wait)(range(10)):  # no "if __name__", no close
    print("got", item, flush=True)
    if item == 2 and sys.argv[1] == "leave":
        input()
        break
"""


@pytest.mark.parametrize("end", ["leave", "SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_is_left_however_the_process_ends(end: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    process = subprocess.Popen(
        [sys.executable, script, end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    workers = []
    for line in process.stdout:
        workers = workers or children(process.pid)
        if line == "got 2\n":
            break
    assert len(workers) == 2
    if end == "SIGINT":  # as Ctrl-C: everybody in the group
        os.killpg(process.pid, signal.SIGINT)
    elif end != "leave":
        process.send_signal(signal.Signals[end])
    _, errors = process.communicate("\n" if end == "leave" else None, timeout=DEADLINE_S)
    assert (process.returncode == 0) == (end == "leave")
    if end == "SIGINT":
        assert errors.count("Traceback") == 1  # none of the workers'
    until(lambda: not any(map(alive, workers)))


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="0 stages, lanes=1"):
        Pipeline()
    with pytest.raises(ValueError, match="lanes=0"):
        Pipeline(len, lanes=0)
    with pytest.raises(ValueError, match="slots must be a power of two"):
        Pipeline(len, slots=3)
    with pytest.raises(TypeError, match="stage 2 must be a function, not 'decode'"):
        Pipeline(len, "decode")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pickle"):
        Pipeline(threading.Lock().acquire)
    with (
        Pipeline(len, slots=2) as pipeline,
        pytest.raises(ValueError, match="held=2 must be below slots=2"),
    ):
        pipeline([[]], held=2)


def test_rings_refuse_what_they_cannot_do() -> None:
    descriptor = ring.create(2, 4096)
    producer, consumer = ring.Producer(descriptor, 4096), ring.Consumer(descriptor)
    assert consumer.take(0.01, copy=True) == []
    with pytest.raises(ring.ItemTooLarge, match="pass slot_bytes=8"):
        producer.put(np.zeros(1000), 1)
    assert producer.put({"a": 1}, 1)
    assert producer.put(np.arange(3), 1)
    assert not producer.put(None, 0.01)
    with pytest.raises(ValueError, match="no item is held"):
        consumer.release()
    assert consumer.take(1, copy=True) == [{"a": 1}]
    consumer.release()
    assert producer.put("last", 1)
    producer.close()
    ((array,),) = [consumer.take(1, copy=False)]
    assert consumer.take(1, copy=True) == ["last"]
    with pytest.raises(ring.RingEnded, match=r"producer .* has closed it"):
        consumer.take(1, copy=True)
    consumer.close()
    assert array.tolist() == [0, 1, 2]  # its memory lives as long as it
    os.close(descriptor)
    zeros = os.memfd_create("zeros")
    os.truncate(zeros, 4096)
    with pytest.raises(ValueError, match="there is no ring in this memory"):
        ring.Consumer(zeros)
    os.close(zeros)
    assert lib.hr_ring_open(0, 0, 0, 0) == ffi.NULL
