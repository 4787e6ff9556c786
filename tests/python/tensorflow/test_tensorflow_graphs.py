"""What graphs do to collectives, and collectives to graphs: tf.function, XLA, failures, SavedModel.

conformance/ tests the results of the verbs, test_tensorflow_training.py tapes and optimizers.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

if os.environ.get("TEST_TORCH_FIRST"):
    with contextlib.suppress(ModuleNotFoundError):
        import torch  # noqa: F401

import mpirun
import numpy as np
import pytest
import session
import tensorflow as tf
import tiers
from configured import made_at_once
from live_job import LiveJob

import hororing.numpy
import hororing.tensorflow as hvd
from hororing import errors
from hororing._core import ffi, lib
from hororing._requests.handles import ALLREDUCE
from hororing.tensorflow._tensor import plugin, requests
from hororing.tensorflow._tensor.requests import Request, carry_out

if "TEST_THREADS" in os.environ:
    tf.config.threading.set_inter_op_parallelism_threads(int(os.environ["TEST_THREADS"]))
THREADS = tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count()

HAS_TORCH = importlib.util.find_spec("torch") is not None  # not with `make test-tensorflow`

# More jobs than the one that TensorFlow's files share. They skip slow tests that depend on neither
# ranks nor threads.
AGAIN = "TEST_AGAIN"
JOBS = {
    "2 ranks, one thread, torch first": (
        2,
        {AGAIN: "1", "TEST_THREADS": "1", "TEST_TORCH_FIRST": "1"},
    ),
    "2 ranks, eight threads": (2, {AGAIN: "1", "TEST_THREADS": "8"}),
    "1 rank": (1, {AGAIN: "1"}),
}
FIRST_JOB = AGAIN not in os.environ


def submitted() -> int:
    """Return the number of requests that this rank has submitted."""
    stats = ffi.new("hr_stats *")
    lib.hr_stats_now(stats)
    return int(stats.submitted)


@contextlib.contextmanager
def requests_made(count: int) -> Iterator[None]:
    before = submitted()
    yield
    assert submitted() - before == count


def total(tensor: Any, **options: Any) -> tf.Tensor:
    return hvd.allreduce(tensor, op=hvd.Sum, **options)


def of_all(value: Callable[[int], Any]) -> Any:
    """Return the sum of `value` over all ranks."""
    return sum(np.asarray(value(rank)) for rank in range(hvd.size()))


def agree(result: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.asarray(result), np.asarray(wanted), rtol=1e-6)


def rss_mib() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def case_start() -> None:
    hvd.init()


# -- what runs, how often, and when ----------------------------------------------------------------


def case_requests_are_in_flight_together_while_the_graph_goes_on() -> None:
    # Each rank makes its last tensor only after its other one is in flight, and the ranks submit
    # the two in opposite orders: requests one by one, or all at the end, would be a deadlock.
    if hvd.size() == 1 or THREADS == 1:
        return
    seen = []

    def when_the_other_is_submitted(value: np.ndarray) -> np.ndarray:
        deadline = time.monotonic() + 20
        while submitted() == before and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(submitted() - before)
        return value

    @tf.function
    def step(x: tf.Tensor) -> Any:
        late = tf.numpy_function(when_the_other_is_submitted, [x], tf.float32, stateful=False)
        late = tf.ensure_shape(late, [3])
        both = (x, late) if hvd.rank() == 0 else (late, x)
        return carry_out(
            [Request(ALLREDUCE, name, [each]) for name, each in zip("ab", both, strict=True)]
        )

    for _ in range(3):
        before = submitted()
        for (result,) in step(tf.fill([3], 1.0 + hvd.rank())):
            agree(result, of_all(lambda rank: np.full(3, 1.0 + rank)))
    assert seen == [1, 1, 1]


def case_a_small_sum_in_eager_mode_needs_no_negotiation() -> None:
    if hvd.size() == 2:
        assert made_at_once(lambda: agree(total(tf.ones([3]), name="at once"), [2.0] * 3))


def case_nothing_is_folded_pruned_or_merged() -> None:
    @tf.function
    def step(x: tf.Tensor) -> Any:
        total(x)  # the result is not used
        constant = total(tf.constant([1.0, 2.0]))
        total(tf.constant([1.0, 2.0]))
        twice = total(x), total(x), total(x, name="one"), total(x, name="one")
        carry_out([Request(ALLREDUCE, name, [x]) for name in ("left", "right")])
        return constant, twice

    x = tf.constant([1.0, 2.0])
    step(x)
    for _ in range(3):
        with requests_made(9):
            constant, twice = step(x)
        for result in (constant, *twice):
            agree(result, [hvd.size(), 2 * hvd.size()])


def case_loops() -> None:
    size, rank = hvd.size(), hvd.rank()

    @tf.function
    def while_loop() -> tf.Tensor:
        def body(i: tf.Tensor, results: tf.TensorArray) -> Any:
            value = tf.cast(10 * i + rank, tf.float32)
            if rank == 0:  # iterations take different times on different ranks
                work = tf.linalg.matmul(tf.ones([200, 200]) * value, tf.ones([200, 200]))
                value = tf.cond(i % 2 == 0, lambda: work[0, 0] / 200, lambda: value)
            return i + 1, results.write(i, total(value))

        array = tf.TensorArray(tf.float32, 12)
        _, results = tf.while_loop(
            lambda i, _: i < 12, body, [0, array], parallel_iterations=10
        )  # fmt: skip
        return results.stack()

    @tf.function
    def mapped(x: tf.Tensor) -> tf.Tensor:
        return tf.map_fn(total, x, parallel_iterations=10)

    @tf.function
    def folded(x: tf.Tensor) -> tf.Tensor:
        return tf.foldl(lambda done, each: done + total(each), x)

    @tf.function
    def autograph(x: tf.Tensor) -> tf.Tensor:
        done = tf.zeros([])
        for each in x:
            if each > 3:
                done += total(each)
            else:
                done -= total(2 * each)
        return done

    for _ in range(3):
        with requests_made(12):
            agree(while_loop(), of_all(lambda r: 10 * np.arange(12) + r))
    numbers = tf.range(20.0)
    with requests_made(20):
        agree(mapped(numbers + rank), of_all(lambda r: np.arange(20) + r))
    with requests_made(19):
        agree(folded(numbers), size * np.sum(np.arange(20)))
    with requests_made(20):
        agree(autograph(numbers), size * (sum(range(4, 20)) - 2 * sum(range(4))))


def case_branches() -> None:
    @tf.function
    def branches(x: tf.Tensor, which: tf.Tensor) -> tf.Tensor:
        first = tf.cond(which, lambda: total(x), lambda: total(2 * x))
        second = tf.switch_case(tf.cast(which, tf.int32), [lambda: total(3 * x), lambda: x])
        return tf.stack([first, second])

    with requests_made(1):
        agree(branches(tf.constant(1.0), tf.constant(True)), [hvd.size(), 1])
    with requests_made(2):
        agree(branches(tf.constant(1.0), tf.constant(False)), [2 * hvd.size(), 3 * hvd.size()])


def case_functions_in_functions() -> None:
    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return total(x)

    @tf.function
    def outer(x: tf.Tensor) -> list[tf.Tensor]:
        return [inner(factor * x) for factor in range(10)] + [inner(tf.ones([3]))[0]]

    for _ in range(3):
        with requests_made(11):
            agree(outer(tf.constant(1.0)), [*(hvd.size() * np.arange(10)), hvd.size()])


def case_functions_of_one_name() -> None:
    def make(factor: float) -> Callable[[tf.Tensor], tf.Tensor]:
        @tf.function
        def step(x: tf.Tensor) -> tf.Tensor:
            return total(factor * x)

        return step

    steps = [make(1.0), make(2.0), make(3.0)]
    together = tf.function(lambda x: [step(x) for step in steps])
    agree([step(tf.constant(1.0)) for step in steps], hvd.size() * np.array([1, 2, 3]))
    agree(together(tf.constant(1.0)), hvd.size() * np.array([1, 2, 3]))


def late_on(rank: int, x: tf.Tensor) -> tf.Tensor:
    """Return `x`; on this rank some milliseconds later, and so does its gradient arrive."""

    def wait(value: np.ndarray) -> np.ndarray:
        time.sleep(0.01 if hvd.rank() == rank % hvd.size() else 0)
        return value

    def same(x: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), x.shape)

    return tf.custom_gradient(lambda x: (same(x), same))(x)


def case_calls_of_one_name_keep_their_order() -> None:
    # The functions only read a variable, so TensorFlow does not order them.
    weight, x = tf.Variable(2.0), tf.constant(1.0 + hvd.rank())
    s, sums = hvd.size(), of_all(lambda rank: 2.0 * (1 + rank))

    def one(x: tf.Tensor, late: int, name: str | None = None) -> tf.Tensor:
        return late_on(late, total(late_on(late, x) * weight, name=name))

    step = tf.function(one)
    named = [tf.function(functools.partial(one, name="same")) for _ in range(2)]

    def update_1(x: tf.Tensor, late: int) -> tf.Tensor:
        return one(x, late)

    def update_2(x: tf.Tensor, late: int) -> tf.Tensor:
        return one(x, late)

    update_1, update_2 = tf.function(update_1), tf.function(update_2)

    @tf.recompute_grad
    def again(x: tf.Tensor) -> tf.Tensor:
        return step(x, 0) + step(10 * x, 1)

    def branches(x: tf.Tensor) -> tf.Tensor:
        first = tf.cond(x > 0, lambda: one(x, 0), lambda: one(x, 1))
        return first + tf.cond(x > 0, lambda: one(10 * x, 1), lambda: one(x, 0))

    def in_loop(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(
            lambda i, _: i < 2,
            lambda i, done: (i + 1, done + step(x / 2, 0) + step(10 * x / 2, 1)),
            [0, tf.zeros([])],
        )[1]

    ways: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
        "one function": lambda x: step(x, 0) + step(10 * x, 1),
        "names with numbers": lambda x: update_1(x, 0) + update_2(10 * x, 1),
        "names of the user": lambda x: (
            named[0](x, 0) + one(4 * x, 1, "same") + named[1](5 * x, 0) + one(x, 1, "same")
        ),
        "branches": branches,
        "loop": in_loop,
        "recomputed": again,
    }

    every = tf.function(lambda x: tf.stack([way(x) for way in ways.values()]))

    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            results = every(x)
        return tape.gradient(results, x)

    for _ in range(2):
        results = dict(zip(ways, every(x).numpy(), strict=True))
        assert results == dict.fromkeys(ways, 11 * sums)
        agree(gradient(x), 11 * 2 * s * len(ways))
    if FIRST_JOB:
        return
    agree(tf.function(gradient)(x), 11 * 2 * s * len(ways))


def case_calls_of_other_names_run_at_the_same_time() -> None:
    first, second = tf.Variable(1.0), tf.Variable(1.0)
    done = threading.Event()

    def hold(x: np.ndarray) -> np.ndarray:
        return x if done.wait(5) else np.float32(np.nan)

    def end(x: np.ndarray) -> np.ndarray:
        done.set()
        return x

    @tf.function
    def waits(x: tf.Tensor) -> tf.Tensor:
        return total(tf.numpy_function(hold, [x], tf.float32) * first)

    @tf.function
    def ends(x: tf.Tensor) -> tf.Tensor:
        return tf.numpy_function(end, [total(x * second)], tf.float32)

    if THREADS > 1:  # `hold` takes one
        both = tf.function(lambda x: (waits(x), ends(2 * x)))
        agree(both(tf.constant(1.0)), [hvd.size(), 2 * hvd.size()])


def case_one_rank_traces_more_often() -> None:
    for reduce_retracing in (False, True):

        @functools.partial(tf.function, reduce_retracing=reduce_retracing)
        def step(x: tf.Tensor) -> tf.Tensor:
            return total(total(x) + tf.cond(x[0] > 0, lambda: total(x), lambda: x))

        for length in (1, 2, 3):
            if hvd.rank() == 1:
                step.get_concrete_function(tf.TensorSpec([length + 5]))
                step.get_concrete_function(tf.TensorSpec([None], tf.float32))
            with requests_made(3):
                agree(step(tf.ones([length])), np.full(length, 2 * hvd.size() ** 2))


def case_threads() -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        @tf.function
        def step(x: tf.Tensor) -> tf.Tensor:
            return total(x, name=f"graph{number}")

        try:
            for i in range(40):
                x = tf.fill([3], float(i + number))
                agree(step(x), hvd.size() * x.numpy())
                agree(total(x, name=f"eager{number}"), hvd.size() * x.numpy())
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# -- many at once ----------------------------------------------------------------------------------


def independent(kind: str) -> list[tf.Tensor]:
    """Return many independent verbs, which executors run in any order."""
    numbers = [tf.fill([4], float(number)) for number in range(100)]
    if kind == "allgathers":
        return [hvd.allgather(x) for x in numbers]
    if kind == "reducescatters":
        return [hvd.reducescatter(x, op=hvd.Sum) for x in numbers]
    with tf.GradientTape(persistent=True) as tape:
        for x in numbers[:30]:
            tape.watch(x)
        results = [hvd.broadcast(x * x, 0) for x in numbers[:30]]
    return [tape.gradient(y, x) for y, x in zip(results, numbers[:30], strict=True)]


def check_independent(kind: str, results: list[Any]) -> None:
    assert len(results) == (30 if kind == "gradients of broadcasts" else 100)
    for number, result in enumerate(results):
        if kind == "allgathers":
            agree(result, np.full(4 * hvd.size(), number))
        elif kind == "reducescatters":
            agree(result, np.full(4 // hvd.size(), hvd.size() * number))
        else:
            agree(result, np.full(4, 2.0 * number if hvd.rank() == 0 else 0.0))


KINDS = ("allgathers", "reducescatters", "gradients of broadcasts")


def case_many_independent_verbs_in_a_function() -> None:
    for kind in KINDS:
        step = tf.function(functools.partial(independent, kind))
        for _ in range(3):
            check_independent(kind, step())


def case_many_independent_verbs_in_a_session_of_tensorflow_1() -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        fetched = {kind: independent(kind) for kind in KINDS}
    for threads in (1, 2, 8):
        config = v1.ConfigProto(inter_op_parallelism_threads=threads, use_per_session_threads=True)
        with v1.Session(graph=graph, config=config) as session:
            for kind in KINDS:
                check_independent(kind, session.run(fetched[kind]))
            for kind, results in session.run(fetched).items():
                check_independent(kind, results)


def case_a_loop_of_tensorflow_1_reduces_one_iteration_after_the_other() -> None:
    v1 = tf.compat.v1
    v2 = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            array = tf.TensorArray(tf.float32, 12)
            _, array = v1.while_loop(
                lambda i, _: i < 12,
                lambda i, results: (i + 1, results.write(i, total(tf.cast(i, tf.float32)))),
                [0, array],
                parallel_iterations=1,
            )
            results = array.stack()
        with v1.Session(graph=graph) as session:
            agree(session.run(results), hvd.size() * np.arange(12))
    finally:
        if v2:
            v1.enable_control_flow_v2()


# -- gradients -------------------------------------------------------------------------------------


def case_gradients_of_functions() -> None:
    # With s ranks of equal x: y = sum (s x^2)^2, and each gradient is summed over the ranks.
    s = hvd.size()
    values = np.array([1.0, 2.0])
    x = tf.constant(values)

    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(total(x * x) ** 2)

    def first(function: Any, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x), tape.gradient(y, x)

    def second(function: Any, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            gradient, _ = first(function, x)
        return tape.gradient(gradient, x)

    wanted = 4 * s**2 * values**3
    for function in (loss, tf.function(loss)):
        for run in (first, tf.function(first)):
            for gradient in run(function, x):
                agree(gradient, wanted)
        for run in (second, tf.function(second)):
            agree(run(function, x), 12 * s**2 * values**2)


def case_recomputed_gradients() -> None:
    weights = tf.Variable([1.0, 2.0])

    @tf.recompute_grad
    def layer(x: tf.Tensor) -> tf.Tensor:
        return total(x * weights * weights)

    @tf.function
    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x) ** 2)
        return tape.gradient(loss, weights)

    for _ in range(2):
        with requests_made(3):  # forward, again, backward
            agree(gradient(tf.ones([2])), 4 * hvd.size() ** 2 * np.array([1.0, 8.0]))


# -- memory ----------------------------------------------------------------------------------------


def case_inputs_are_not_written_to() -> None:
    if not FIRST_JOB:
        return
    values = np.arange(64, dtype=np.float32) + 1
    given = tf.constant(values)
    view = np.asarray(given)
    variable = tf.Variable(values)
    shared = values.copy()
    verbs: list[Callable[[Any], Any]] = [
        total,
        lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum),
        lambda x: hvd.allreduce(x, op=hvd.Product, prescale_factor=3.0),
        lambda x: hvd.broadcast(x * 1.0, hvd.size() - 1),
        lambda x: hvd.broadcast(x, 0),
        hvd.allgather,
        hvd.alltoall,
        lambda x: hvd.reducescatter(x, op=hvd.Sum),
        lambda x: carry_out(
            [Request(ALLREDUCE, name, [tf.convert_to_tensor(x)]) for name in ("c", "d")]
        ),
    ]

    def unchanged(*tensors: Any) -> None:
        for tensor in (given, view, variable, shared, *tensors):
            np.testing.assert_array_equal(np.asarray(tensor), values)

    for verb in verbs:

        @tf.function
        def step(argument: tf.Tensor, verb: Callable[[Any], Any] = verb) -> Any:
            constant = tf.constant(values)
            read = variable.read_value()
            temporary = argument + 1
            foreign = tf.numpy_function(lambda: shared, [], tf.float32)
            foreign.set_shape([64])
            for tensor in (constant, read, variable, argument, temporary, foreign):
                verb(tensor)
            return constant, read, argument, temporary - 1

        for each in (given, tf.identity(given), variable, variable.read_value(), values):
            verb(each)
            unchanged()
        for _ in range(2):
            unchanged(*step(given))


def case_temporaries_become_results() -> None:
    elements = 1 << 24  # 64 MiB

    @tf.function
    def step(x: tf.Tensor, elements: tf.Tensor) -> tf.Tensor:
        return total(tf.fill([elements], x))[0]

    def peak_mib(count: int) -> float:
        Path("/proc/self/clear_refs").write_text("5")  # forget the high-water mark
        before = rss_mib()
        agree(step(tf.constant(1.0), tf.constant(count)), hvd.size())
        (line,) = (
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmHWM")
        )
        return int(line.split()[1]) / 1024 - before

    try:
        peak_mib(16)
    except OSError:
        return  # containers may forbid it
    # Only once, because TensorFlow keeps the memory.
    assert peak_mib(elements) < 1.5 * 64


def case_eager_calls_do_not_grow_memory() -> None:
    if not FIRST_JOB:
        return
    x = tf.ones([4])
    hvd.allreduce(x)
    before = rss_mib()
    for i in range(1500):
        hvd.allreduce(x, name=f"x{i}", prescale_factor=1.0 + i)
        hvd.allreduce(x)
    assert rss_mib() - before < 20


# -- failures --------------------------------------------------------------------------------------


def case_a_graph_that_fails_with_requests_in_flight() -> None:
    @tf.function
    def step(x: tf.Tensor, fail: tf.Tensor) -> list[tf.Tensor]:
        # Like carry_out, but the graph fails between the submissions and the waits.
        token = plugin.operations.hororing_step()
        made = [
            Request(ALLREDUCE, f"part{i}", [tf.fill([1 << 18], x + float(i))]) for i in range(4)
        ]
        handles = [requests._submit(token, each, tf.constant(0, tf.int64)) for each in made]
        with tf.control_dependencies(handles):
            checked = tf.debugging.check_numerics(tf.where(fail, np.nan, x), "as told")
        with tf.control_dependencies([checked]):
            handles = [tf.identity(handle) for handle in handles]
        return [result[0] for result in requests._wait(made, handles)]

    one = tf.constant(1.0)
    before = 0
    for i in range(200):
        if i == 40:
            before = rss_mib()
        if i % 10 == 0 and i // 10 % max(2, hvd.size()) == hvd.rank():
            time.sleep(0.005)  # ranks are late in turn
        with requests_made(4), pytest.raises(tf.errors.InvalidArgumentError, match=r"as told"):
            step(one, tf.constant(True))
    assert rss_mib() - before < 160  # 160 times 4 MiB were dropped; TensorFlow keeps some errors
    agree(step(one, tf.constant(False)), hvd.size() * np.array([1, 2, 3, 4]))


def case_errors_of_the_core_in_graphs() -> None:
    size, rank = hvd.size(), hvd.rank()

    @tf.function(reduce_retracing=True)
    def step(x: tf.Tensor) -> tf.Tensor:
        return total(x, name="mismatched")

    kind: Any = tf.errors.FailedPreconditionError
    if size > 1:
        for _ in range(3):
            with pytest.raises(kind, match=r"MismatchError: allreduce 'mismatched'") as caught:
                step(tf.ones([2 + rank]))
            assert "rank 0: [2]; rank 1: [3]" in caught.value.message
            agree(step(tf.ones([2])), [size, size])
            # In eager mode an error has both hororing's and TensorFlow's type.
            with pytest.raises(errors.MismatchError, match=r"'mismatched'.*rank 0: .2") as caught:
                total(tf.ones([2 + rank]), name="mismatched")
            assert isinstance(caught.value, tf.errors.FailedPreconditionError)
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

    if size > 1 and rank == 0:  # the others come later
        handle = hororing.numpy.allreduce_async(np.ones(2, np.float32), name="same", op=hvd.Sum)
        kind = tf.errors.InvalidArgumentError
        with pytest.raises(kind, match=r"DuplicateNameError: .*'same'"):
            tf.function(total)(tf.ones([2]), name="same")
        # Loops of TensorFlow 1 and tf.data run several iterations at a time.
        mapped = tf.data.Dataset.range(2).map(lambda _: total(tf.ones([2]), name="same"))
        with pytest.raises(kind, match=r"DuplicateNameError: .*'same'.*use another name"):
            next(iter(mapped))
        with pytest.raises(errors.DuplicateNameError, match=r"'same'") as caught:
            total(tf.ones([2]), name="same")
        assert isinstance(caught.value, tf.errors.InvalidArgumentError)
    hvd.allreduce(tf.ones([1]))
    if size > 1 and rank > 0:
        total(tf.ones([2]), name="same")
    elif size > 1:
        agree(hororing.numpy.synchronize(handle), [size, size])
    agree(tf.function(total)(tf.ones([2]), name="same"), [size, size])

    @tf.function
    def wrong(splits: tf.Tensor) -> Any:
        return hvd.alltoall(tf.ones([2]), splits, name="exchange")

    kind = tf.errors.InvalidArgumentError
    with pytest.raises(kind, match=r"ValueError: .*'exchange'.*\[-1"):
        wrong(tf.constant([-1] * size))
    with pytest.raises(ValueError, match=r"'exchange'.*\[-1") as caught:
        hvd.alltoall(tf.ones([2]), [-1] * size, name="exchange")
    assert isinstance(caught.value, tf.errors.InvalidArgumentError)
    with pytest.raises(tf.errors.InvalidArgumentError, match="root"):
        hvd.broadcast(tf.ones([2]), size + 5)
    with pytest.raises(ValueError, match=r"'exchange'.*\[4294967297"):  # 1 in 32 bits
        hvd.alltoall(tf.ones([size]), [2**32 + 1] * size, name="exchange")
    agree(wrong(tf.constant([2] + [0] * (size - 1)))[0], np.ones(2 * size if rank == 0 else 0))


def case_process_sets_and_ranks_may_change_under_a_graph() -> None:
    # A reduce-scatter counts its rows when it runs; otherwise it would write beyond its result.
    rows = 600

    @tf.function(input_signature=[tf.TensorSpec([None, 64], tf.float64)])
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(hvd.reducescatter(x, op=hvd.Sum, name="rows"))

    x = tf.ones([rows, 64], tf.float64)
    agree(step(x), rows * 64)
    hvd.shutdown()
    hvd.init(comm=[hvd_rank_of_the_job()])
    agree(step(x), rows * 64)
    hvd.shutdown()
    hvd.init()


def hvd_rank_of_the_job() -> int:
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))  # after shutdown()


# -- XLA -------------------------------------------------------------------------------------------


def case_xla_is_refused_with_the_remedy() -> None:
    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x)

    compiled = tf.function(lambda x: inner(x), jit_compile=True)
    for function in (tf.function(hvd.allreduce, jit_compile=True), compiled):
        with pytest.raises(ValueError, match=r"XLA cannot compile .* use jit_compile=False"):
            function(tf.ones([2]))
    inner(tf.ones([2]))
    # If the function was traced before, the text is XLA's, but quotes hororing's name.
    with pytest.raises(tf.errors.InvalidArgumentError, match="needs_jit_compile_False"):
        compiled(tf.ones([2]))


def case_xla_may_compile_what_is_around() -> None:
    dense = tf.function(lambda x: tf.nn.relu(x @ x) + 1.0, jit_compile=True)

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(dense(total(dense(x))))

    x = np.eye(8, dtype=np.float32)
    middle = (np.maximum(x @ x, 0) + 1) * hvd.size()
    wanted = np.sum(np.maximum(middle @ middle, 0) + 1)
    agree(step(x), wanted)
    tf.config.optimizer.set_jit(True)
    try:
        with requests_made(2):
            for _ in range(2):
                agree(tf.function(step.python_function)(tf.constant(x)), wanted)
    finally:
        tf.config.optimizer.set_jit(False)


# -- with others -----------------------------------------------------------------------------------


def case_torch_in_the_same_process() -> None:
    if not HAS_TORCH or not (FIRST_JOB or "torch" in sys.modules):
        return
    import torch

    import hororing.torch as hvd_torch

    step = tf.function(lambda x: total(x))
    for i in range(3):
        x = float(i + hvd.rank())
        wanted = of_all(lambda rank, i=i: float(i + rank))
        agree(step(tf.constant(x)), wanted)
        handle = hvd_torch.allreduce_async(torch.tensor([x]), op=hvd_torch.Sum)
        agree(total(tf.constant(x)), wanted)
        agree(hvd_torch.synchronize(handle), [wanted])


def case_saved_models() -> None:
    if not FIRST_JOB:
        return
    folder = tempfile.mkdtemp()
    if hvd.rank() == 0:
        module = tf.Module()
        module.weights = tf.Variable([2.0, 3.0])
        module.reduce = tf.function(
            lambda x: total(x * module.weights, name="saved"), [tf.TensorSpec([2])]
        )

        def rows(x: tf.Tensor) -> tf.Tensor:
            return hvd.reducescatter(x, op=hvd.Sum, name="rows")

        module.rows = tf.function(rows, [tf.TensorSpec([None, 64])])
        model = tf.Module()
        model.weights = module.weights
        model.call = tf.function(lambda x: tf.reduce_sum(x * model.weights), [tf.TensorSpec([2])])
        tf.saved_model.save(module, f"{folder}/module")
        tf.saved_model.save(model, f"{folder}/model")
        code = f"""
import sys
import tensorflow as tf
sys.modules["hororing"] = None  # not installed
model = tf.saved_model.load("{folder}/model")
assert model.call(tf.constant([1.0, 1.0])).numpy() == 5
del sys.modules["hororing"]
import hororing.tensorflow as hvd
module = tf.saved_model.load("{folder}/module")
hvd.init()
assert module.reduce(tf.constant([1.0, 1.0])).numpy().tolist() == [2, 3]
assert module.rows(tf.ones([600, 64])).numpy().sum() == 600 * 64
"""
        # A process outside this job.
        environment = {
            key: value for key, value in os.environ.items()
            if not key.startswith(("OMPI_", "PMIX_", "PRTE_"))
        }  # fmt: skip
        ended = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr
    shutil.rmtree(folder)
    hvd.allreduce(tf.ones([1]), name="the other one has saved")


# -- ends ------------------------------------------------------------------------------------------


def case_stalls() -> None:
    if hvd.size() == 1:
        return
    for graph in (True, False):
        hvd.shutdown()
        usual = {key: os.environ[key] for key in mpirun.STALL_ENVIRONMENT}
        os.environ.update(HORORING_STALL_WARNING_S="0.2", HORORING_STALL_SHUTDOWN_S="0.5")
        hvd.init()
        os.environ.update(usual)
        alone = functools.partial(total, name=f"only {hvd.rank()}")
        kind: Any = errors.StalledError
        if graph:
            alone = tf.function(alone)
            kind = tf.errors.DeadlineExceededError
        with pytest.raises(kind, match=r"allreduce 'only") as caught:
            alone(tf.ones([2]))
        assert not graph or "StalledError: " in caught.value.message
    hvd.shutdown()
    hvd.init()


def case_another_rank_shuts_down() -> None:
    if hvd.size() == 1:
        return
    for graph in (True, False):
        if hvd.rank() == 1:
            hvd.shutdown()
        else:
            kind: Any = errors.ShutDownError
            if graph:
                kind = tf.errors.AbortedError
            with pytest.raises(kind, match=r"rank 1 has shut down") as caught:
                (tf.function(total) if graph else total)(tf.ones([2]))
            assert not graph or "ShutDownError: " in caught.value.message
            hvd.shutdown()
        hvd.init()


def case_shutdown() -> None:
    step = tf.function(lambda x: total(x))
    agree(step(tf.ones([2])), [hvd.size()] * 2)
    hvd.shutdown()
    with pytest.raises(
        tf.errors.FailedPreconditionError, match=r"NotInitializedError: .*use hvd.init\(\)"
    ):
        step(tf.ones([2]))
    with pytest.raises(errors.NotInitializedError, match="init"):
        total(tf.ones([2]))


@functools.cache
def _job(name: str) -> mpirun.Job:
    size, environment = JOBS[name]
    return mpirun.run(
        __file__, size, script=False, timeout_s=mpirun.CASES_LIMIT_S, environment=environment
    )


test_graphs = session.on_ranks(globals(), 2, push=[2], session="tensorflow")


@tiers.full
@pytest.mark.timeout(mpirun.CASES_LIMIT_S + 20)
@pytest.mark.parametrize("case", mpirun.case_names(globals()))
@pytest.mark.parametrize("job", JOBS)
def test_graphs_in_other_jobs(job: str, case: str):
    _job(job).check(case)


# -- lost peers, Ctrl-C ----------------------------------------------------------------------------


def say(word: str, *rest: object) -> None:
    os.write(1, " ".join(map(str, [word, *rest, "\n"])).encode())


def lose_a_peer() -> None:
    say("pid", os.getpid())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # mpirun's, while survivors speak
    hvd.init()
    hvd.allreduce(tf.ones([1]))
    if hvd.rank() == 1:
        say("ready")
        while True:
            time.sleep(1)
    try:
        say("ready")
        total(tf.ones([2]), name="interrupted")
    except KeyboardInterrupt:
        say("interrupted")
    try:
        tf.function(total)(tf.ones([2]))
    except tf.errors.OpError as failure:
        say("graph", json.dumps([type(failure).__name__, failure.message]))
    try:
        total(tf.ones([2]))
    except errors.PeerLostError as failure:
        say("eager", json.dumps([failure.rank, str(failure)]))


def test_an_interrupt_is_answered_and_a_lost_peer_is_named():
    options = ["--runtime-options", "recoverable"]
    with LiveJob(Path(__file__), 2, "lose_a_peer", options=options) as job:
        job.wait_until_all_say("ready")
        os.kill(job.pid(0), signal.SIGINT)
        job.said(0, "interrupted")
        os.kill(job.pid(1), signal.SIGKILL)
        kind, text = json.loads(job.said(0, "graph"))
        assert kind == "AbortedError"
        assert "PeerLostError: " in text
        assert "rank 1" in text
        rank, text = json.loads(job.said(0, "eager"))
        assert rank == 1
        assert "rank 1" in text


# -- other TensorFlows -----------------------------------------------------------------------------

PROBLEM = """
import ctypes, sys
if len(sys.argv) > 2:
    ctypes.CDLL("libtensorflow_framework.so.2")
problem = ctypes.CDLL(sys.argv[1]).hororing_tensorflow_problem
problem.restype = ctypes.c_char_p
print(problem().decode())
"""


def test_the_plugin_says_what_a_tensorflow_lacks(tmp_path: Path):
    # Another library with the name of TensorFlow's.
    shutil.copy(
        plugin.LIBRARY.with_name("libhororing.so"), tmp_path / "libtensorflow_framework.so.2"
    )
    command = [sys.executable, "-c", PROBLEM, str(plugin.LIBRARY)]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    say = functools.partial(subprocess.check_output, env=environment, text=True)
    assert say(command).strip() == "libtensorflow_framework.so.2 is not loaded in this process"
    assert say([*command, "fake"]).strip() == (
        "libtensorflow_framework.so.2 of this TensorFlow has no function TF_NewStatus"
    )


def test_a_plugin_that_cannot_be_loaded_is_an_import_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    missing, damaged = tmp_path / "missing.so", tmp_path / "damaged.so"
    damaged.write_bytes(b"no library")
    for path, reason in ((missing, "cannot open shared object file"), (damaged, "too short")):
        text = rf"TensorFlow {tf.__version__} does not load .* from {path} .*{reason}.* install"
        with pytest.raises(ImportError, match=text):
            plugin.load(path)
    # For this TensorFlow it registers nothing, so hororing.tensorflow cannot be imported.
    monkeypatch.setattr(tf, "load_op_library", lambda path: object())
    with pytest.raises(ImportError, match=r"libhororing_tensorflow.so .*Use TensorFlow 2.18"):
        importlib.reload(plugin)


WITHOUT_THE_PROOF = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
void* dlsym(void* library, const char* name) {
  void* (*real)(void*, const char*) = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
  if (real == NULL) real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
  return strstr(name, "ThreadPoolDevice12ComputeAsync") != NULL ? NULL : real(library, name);
}
"""

BLOCKING = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import hororing.tensorflow as hvd
print([str(each.message) for each in caught if each.category is RuntimeWarning])
import tensorflow as tf
hvd.init()
print(tf.function(hvd.allgather)(tf.ones([3])).numpy().tolist())
"""


@tiers.full  # another import of TensorFlow, 8 s
def test_waits_block_with_a_warning_where_tensorflow_has_no_known_asynchronous_kernels(
    tmp_path: Path,
):
    source, library = tmp_path / "hide.c", tmp_path / "hide.so"
    source.write_text(WITHOUT_THE_PROOF)
    subprocess.check_call(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"])
    printed = subprocess.check_output(
        [sys.executable, "-c", BLOCKING],
        env={**os.environ, "LD_PRELOAD": str(library)},
        text=True,
        timeout=100,
    )
    warned, result = printed.splitlines()[-2:]
    assert "raise inter_op_parallelism_threads" in warned
    assert result == "[1.0, 1.0, 1.0]"


if __name__ == "__main__":
    globals()[sys.argv[1]]()
