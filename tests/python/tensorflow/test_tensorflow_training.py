"""Tapes, optimizers of TensorFlow 1, variables and objects, in eager mode and in tf.function.

conformance/ tests the results of the verbs, test_tensorflow_graphs.py tests them in graphs.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import mpirun
import numpy as np
import pytest
import session
import tensorflow as tf
from asked import asked_during

import hororing.tensorflow as hvd
from hororing import errors
from hororing._adapters import replica_check
from hororing._requests import handles
from hororing.guard import options as guard_options
from hororing.tensorflow import replicas

SHAPES = [(3, 4), (4,), (), (2, 1, 3)]


def values(rank: int, position: int) -> np.ndarray:
    """Return a gradient of `rank`: small multiples of 1/4, whose sums are exact."""
    rng = np.random.default_rng([mpirun.seed(), rank, position])
    return rng.integers(-40, 41, SHAPES[position]) / 4


def mean_of(position: int, ranks: Any = None) -> np.ndarray:
    ranks = range(hvd.size()) if ranks is None else ranks
    return np.mean([values(rank, position) for rank in ranks], axis=0)


def variables() -> list[tf.Variable]:
    # Several have the same name, as the layers of Keras 3 do.
    return [tf.Variable(np.zeros(shape), name="kernel") for shape in SHAPES]


def gradients_by(
    wrap: Callable[[tf.GradientTape], Any],
    sources: list[tf.Variable],
    step: int = 0,
    **options: Any,
) -> list[Any]:
    """Return the gradients of a loss whose local gradients are `values`."""
    mine = [tf.constant(values(hvd.rank(), at)) for at in range(len(sources))]
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v * x) for v, x in zip(sources, mine, strict=True)])
    return wrap(tape).gradient(loss, sources, **options)


def check_both(function: Callable[..., Any], check: Callable[[Any], None]) -> None:
    """Run it eagerly, then twice in a graph that is traced once."""
    check(function())
    graph = tf.function(function)
    check(graph())
    check(graph())


def case_init() -> None:
    for ask in (hvd.rank_op, hvd.size_op, hvd.process_set_included_op):
        with pytest.raises(errors.NotInitializedError, match="not been initialized"):
            ask()
    hvd.init(process_sets="dynamic")


def case_a_tape_averages_gradients() -> None:
    sources = variables()

    def check(gradients: list[tf.Tensor]) -> None:
        assert [g.shape for g in gradients] == [v.shape for v in sources]
        for at, gradient in enumerate(gradients):
            np.testing.assert_array_equal(gradient, mean_of(at))

    for options in ({}, {"groups": 1}, {"groups": 3}, {"groups": 99},
                    {"groups": [[sources[2], sources[0]], [sources[3]]]},
                    {"gradient_predivide_factor": 2.0}):  # fmt: skip
        check_both(
            lambda o=options: gradients_by(lambda t: hvd.DistributedGradientTape(t, **o), sources),
            check,
        )
    check_both(
        lambda: gradients_by(hvd.DistributedGradientTape, sources, use_generic_names=True), check
    )
    with mock.patch("hororing.tensorflow.tape.reduce_gradients", return_value=[0] * 4) as reduce:
        gradients_by(hvd.DistributedGradientTape, sources, use_generic_names=True)
    assert reduce.call_args[0][1] == [f"gradients/grad_{at}" for at in range(4)]
    with tf.GradientTape() as tape:
        loss = sources[2] + 1.0
    distributed = hvd.DistributedGradientTape(tape)  # takes the arguments of a tf.GradientTape, too
    found = distributed.gradient(loss, sources[1:3], None, tf.UnconnectedGradients.ZERO)
    np.testing.assert_array_equal(found[0], np.zeros(SHAPES[1]))


def case_other_operations_and_compression() -> None:
    sources = variables()
    ranks = range(hvd.size())
    for op, combine in ((hvd.Sum, np.sum), (hvd.Min, np.min), (hvd.Max, np.max),
                        (hvd.Product, np.prod)):  # fmt: skip
        reduced = gradients_by(lambda t, op=op: hvd.DistributedGradientTape(t, op=op), sources)
        for at, gradient in enumerate(reduced):
            np.testing.assert_array_equal(gradient, combine([values(r, at) for r in ranks], axis=0))
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        reduced = gradients_by(
            lambda t, c=compression: hvd.DistributedGradientTape(t, compression=c), sources
        )
        for at, gradient in enumerate(reduced):
            assert gradient.dtype == tf.float64
            np.testing.assert_allclose(gradient, mean_of(at), rtol=2e-2, atol=0.2)


def case_a_tape_weighs_gradients() -> None:
    sources, rank, size = variables(), hvd.rank(), hvd.size()
    table = tf.Variable(np.zeros((5, 2)))
    given = tf.Variable(0.0, dtype=tf.float64)

    def gradients(wrap: Callable[[tf.GradientTape], Any]) -> list[tf.Tensor]:
        return gradients_by(wrap, sources)

    def embedded(wrap: Callable[[tf.GradientTape], Any]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [rank % 4, 4]) * (rank + 1.0))
        return [tf.convert_to_tensor(each) for each in wrap(tape).gradient(loss, [table])]

    graphs = [
        tf.function(lambda make=make: make(lambda t: hvd.DistributedGradientTape(t, weight=given)))
        for make in (gradients, embedded)
    ]
    for weights in ([*range(1, size + 1)], [0] * (size - 1) + [2.5], [0] * size):
        total = sum(weights) or 1
        shares = [weight / total for weight in weights]
        wanted = [
            sum(share * values(each, at) for each, share in enumerate(shares))
            for at in range(len(sources))
        ]
        rows = np.zeros((5, 2))
        for each, share in enumerate(shares):
            rows[each % 4] += share * (each + 1)
            rows[4] += share * (each + 1)
        given.assign(weights[rank])
        for weight in (weights[rank], tf.constant([weights[rank]], tf.float32)):
            wrap = lambda t, w=weight: hvd.DistributedGradientTape(t, weight=w)  # noqa: E731
            for found, expected in zip(
                [*gradients(wrap), *embedded(wrap)], [*wanted, rows], strict=True
            ):
                np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
        for graph, expected_ones in zip(graphs, (wanted, [rows]), strict=True):
            for found, expected in zip(graph(), expected_ones, strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    large = 70_000.0  # more than a 16-bit float can be
    (found,) = embedded(
        lambda t: hvd.DistributedGradientTape(t, weight=large, compression=hvd.Compression.fp16)
    )
    np.testing.assert_allclose(found[4], [(size + 1) / 2] * 2, rtol=1e-3)
    mean = tf.Variable(tf.ones(3, tf.float64) * (rank + 1))
    with tf.GradientTape() as tape:
        result = hvd.allreduce(mean, weight=rank + 1)
    total = size * (size + 1) / 2
    expected = sum((each + 1) ** 2 for each in range(size)) / total
    np.testing.assert_allclose(result, np.full(3, expected))
    np.testing.assert_allclose(tape.gradient(result, mean), np.full(3, (rank + 1) * size / total))
    np.testing.assert_allclose(hvd.grouped_allreduce([mean], weight=rank + 1)[0], result)
    with pytest.raises(ValueError, match="weights must be finite and not negative"):
        hvd.allreduce(mean, weight=-1.0 if rank == 0 else 1.0)
    with pytest.raises(NotImplementedError, match=r"cannot be used with tf\.IndexedSlices"):
        hvd.allreduce(tf.IndexedSlices(tf.ones((1, 2)), [0]), weight=1.0)


@mock.patch.object(replica_check._Knob, "is_on", False)  # ranks have different variables
def case_complex_variables_and_averages_of_integer_rows() -> None:
    rank, size = hvd.rank(), hvd.size()
    mean = sum(range(size)) / size
    for dtype in (tf.complex64, tf.complex128):
        dense, table = (tf.Variable(tf.fill(shape, tf.cast(1j * rank, dtype))) for shape in ([], 3))

        def gradients(dense: Any = dense, table: Any = table) -> list[Any]:
            with tf.GradientTape() as tape:
                rows = tf.gather(table, [rank % 3])
                squares = dense * tf.math.conj(dense) + tf.reduce_sum(rows * tf.math.conj(rows))
                loss = tf.math.real(squares)
            tape = hvd.DistributedGradientTape(tape, weight=1.0)
            dense_gradient, rows = tape.gradient(loss, [dense, table])
            return [dense_gradient, tf.reduce_sum(rows.values)]

        def check(found: Any, dtype: tf.DType = dtype) -> None:
            assert {each.dtype for each in found} == {dtype}
            np.testing.assert_allclose(found, [2j * mean, 2j * mean])

        check_both(gradients, check)
        hvd.broadcast_variables([dense, table], size - 1)
        np.testing.assert_array_equal(table, [1j * (size - 1)] * 3)
    if size == 1:
        return
    with tf.GradientTape() as tape:
        loss = tf.math.real(dense)
    with pytest.raises(ValueError, match="op=Max is not defined for complex128"):
        hvd.DistributedGradientTape(tape, op=hvd.Max).gradient(loss, dense)
    integers = tf.IndexedSlices(tf.constant([[-3 * size, 2 * size - 1]]), tf.constant([rank]))
    averaged = hvd.allreduce(integers, name="integers").values
    assert averaged.dtype == tf.int32
    np.testing.assert_array_equal(averaged, [[-3, 1]] * size)
    for dtype in (tf.uint8, tf.int64):  # rows of one index add up before the division
        rows = tf.constant([[1, 3], [5, 200], [7, 1]], dtype)
        slices = tf.IndexedSlices(rows, tf.constant([0, 4, 4]), tf.constant([6, 2]))

        def average(slices: tf.IndexedSlices = slices) -> tf.Tensor:
            found = hvd.allreduce(slices)
            return tf.math.unsorted_segment_sum(found.values, found.indices, 6)

        def check(found: tf.Tensor) -> None:
            np.testing.assert_array_equal(found, [[1, 3], *[[0, 0]] * 3, [12, 201], [0, 0]])

        check_both(average, check)


def case_names_of_variables_that_look_like_numbered_ones() -> None:
    sources = [tf.Variable(1.0, name=name) for name in ("a", "a", "a.2", "a.2", "a")]
    with tf.GradientTape() as tape:
        loss = tf.add_n([(at + 1.0) * each for at, each in enumerate(sources)])
    found = hvd.DistributedGradientTape(tape, groups=5).gradient(loss, sources)
    assert [float(each) for each in found] == [1.0, 2.0, 3.0, 4.0, 5.0]


def case_the_structure_of_sources_is_kept() -> None:
    a, b = tf.Variable(2.0), tf.Variable(3.0)

    def gradients(sources: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = a * (hvd.rank() + 1.0)
        return hvd.DistributedGradientTape(tape).gradient(loss, sources)

    average = (hvd.size() + 1) / 2
    assert float(gradients(a)) == average
    found = gradients({"a": a, "rest": [b, (a,)]})
    assert float(found["a"]) == float(found["rest"][1][0]) == average
    assert found["rest"][0] is None
    empty = tf.Variable(tf.zeros((0, 3)))  # the last one is sent first
    with tf.GradientTape() as tape:
        loss = a * (hvd.rank() + 1.0) + tf.reduce_sum(empty)
    first, last = hvd.DistributedGradientTape(tape).gradient(loss, [a, empty])
    assert float(first) == average
    assert last.shape == (0, 3)


def case_a_wrapped_tape_shares_its_records() -> None:
    x = tf.Variable(1.0)
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(x)
        y = x * x * (hvd.rank() + 1.0)
    distributed = hvd.DistributedGradientTape(tape)
    assert isinstance(distributed, tf.GradientTape)
    for _ in range(2):
        assert float(distributed.gradient(y, x)) == hvd.size() + 1
    assert float(tape.gradient(y, x)) == 2 * (hvd.rank() + 1)
    # It may also wrap the block.
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        y = x * (hvd.rank() + 1.0)
    assert float(tape.gradient(y, x)) == (hvd.size() + 1) / 2


def case_embeddings_send_rows() -> None:
    table = tf.Variable(np.zeros((6, 2)))
    mine = [hvd.rank(), 5]

    def gradient(**options: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, mine)) * (hvd.rank() + 1.0)
        return hvd.DistributedGradientTape(tape, **options).gradient(loss, table)

    wanted = np.zeros((6, 2))
    for rank in range(hvd.size()):
        wanted[[rank, 5]] += rank + 1.0
    for sparse_as_dense in (False, True):

        def check(found: Any, dense: bool = sparse_as_dense) -> None:
            assert isinstance(found, tf.IndexedSlices) is not dense
            np.testing.assert_allclose(tf.convert_to_tensor(found), wanted / hvd.size())

        check_both(lambda d=sparse_as_dense: gradient(sparse_as_dense=d), check)
    assert gradient(op=hvd.Sum).values.shape == (2 * hvd.size(), 2)
    with pytest.raises(NotImplementedError, match="sparse_as_dense"):
        gradient(op=hvd.Max)


def case_local_sources_stay_here() -> None:
    size = hvd.size()
    for scale in (True, False):
        sources = variables()

        def wrap(tape: tf.GradientTape, scale: bool = scale, local: Any = sources[1]) -> Any:
            tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
            tape.register_local_source(local)
            return tape

        reduced = gradients_by(wrap, sources)
        np.testing.assert_array_equal(reduced[0], mean_of(0))
        np.testing.assert_allclose(reduced[1], values(hvd.rank(), 1) / (size if scale else 1))
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(source) for source in sources])
        local, others = wrap(tape).get_local_and_global_gradients(loss, sources)
        (found,) = local
        assert found[0] is sources[1]
        np.testing.assert_allclose(found[1], np.ones(SHAPES[1]) / (size if scale else 1))
        assert [source for source, _ in others] == [sources[0], *sources[2:]]
        for source, gradient in others:
            np.testing.assert_array_equal(gradient, np.ones(source.shape))


def case_local_layers_stay_here() -> None:
    layers = [tf.keras.layers.Dense(2, dtype="float64") for _ in range(3)]
    for layer in layers:
        layer.build((None, 2))
    weights = [weight for layer in layers for weight in layer.trainable_weights]
    for local, kept in ((layers[1], {2, 3}), ([layers[0], layers[2]], {0, 1, 4, 5}), (None, set())):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(weight) for weight in weights]) * (hvd.rank() + 1.0)
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=local)
        found = [float(tf.reduce_max(gradient)) for gradient in tape.gradient(loss, weights)]
        average = (hvd.size() + 1) / 2
        mine = (hvd.rank() + 1) / hvd.size()
        assert found == [mine if at in kept else average for at in range(6)]
    with pytest.raises(ValueError, match="local_layers"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3])


def case_sets_reduce_among_themselves() -> None:
    if hvd.size() == 1:
        return  # that set exists already
    evens = hvd.add_process_set(range(0, hvd.size(), 2))
    sources = variables()
    reduced = gradients_by(
        lambda tape: hvd.DistributedGradientTape(tape, process_set=evens), sources
    )
    for at, gradient in enumerate(reduced):
        wanted = mean_of(at, ranks=evens.ranks) if evens.included() else values(hvd.rank(), at)
        np.testing.assert_array_equal(gradient, wanted)
    hvd.remove_process_set(evens)


def case_a_graph_follows_its_set_to_another_number() -> None:
    if hvd.size() == 1:
        return
    mine = hvd.rank() == 0
    first = hvd.add_process_set([0])
    total = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=first))
    assert not mine or total(tf.ones([])) == 1
    hvd.remove_process_set(first)
    if mine:
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"TypeError: .* not registered"):
            total(tf.ones([]))
    second = hvd.add_process_set([1])  # has the number that the first one had
    hvd.add_process_set(first)
    assert not mine or total(tf.ones([])) == 1
    for each in (first, second):
        hvd.remove_process_set(each)


def case_variables_that_were_not_broadcast_are_an_error_in_the_second_step() -> None:
    if hvd.size() == 1:
        return
    for compiled, broadcasts in ((False, True), (False, False), (True, True), (True, False)):
        sources = [tf.Variable(np.full(3, hvd.rank() + 1.0), name="w"), tf.Variable(0.0, name="b")]

        def step(sources: list[tf.Variable] = sources) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(sources[0] ** 2) + tf.cast(sources[1], tf.float64)
            gradients = hvd.DistributedGradientTape(tape).gradient(loss, sources)
            for source, gradient in zip(sources, gradients, strict=True):
                source.assign_sub(gradient)

        run = tf.function(step) if compiled else step
        run()
        if broadcasts:
            hvd.broadcast_variables(sources, root_rank=0)
            run()
            run()
            continue
        told = r"(?s)1 of 2 parameters.*'w' \(rank 0: .*call hvd\.broadcast_variables|Call hvd\.b"
        with pytest.raises((errors.MismatchError, tf.errors.OpError), match=told):
            run()


def case_no_variable_changes_while_it_is_compared() -> None:
    """A graph orders operations by the resources among their inputs, and closures are none."""
    source = tf.Variable([1.0, 2.0], name="w")
    compared = []

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(source**2)
        gradient = hvd.DistributedGradientTape(tape).gradient(loss, source)
        source.assign_sub(gradient)

    def late(name: str, variable: tf.Variable) -> Any:
        time.sleep(0.2 * hvd.rank())
        compared.append(variable.numpy().tolist())
        return digest(name, variable)

    digest = replicas._digest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "_digest", late)
        step()
        step()
    assert compared == [[-1.0, -2.0]]


def case_a_guard_names_a_variable_that_differs() -> None:
    sources, last = variables(), hvd.size() - 1
    guard = hvd.Guard(sources, every=2)
    for _ in range(3):
        guard.step()
    if hvd.size() == 1:
        return
    assert guard.report()["last_equal"] == 2
    if hvd.rank() == last:
        sources[0][1, 2].assign(0.5)
    with pytest.raises(errors.MismatchError, match=r"at step 4 \(last equal at 2\): .*\[1, 2\]"):
        guard.step()
    # By the environment, in a graph: the tape's sources.
    sources, chosen = variables(), guard_options.parse("every=2,on_divergence=error")

    @tf.function
    def step() -> None:
        gradients_by(hvd.DistributedGradientTape, sources)

    with mock.patch.object(replicas, "from_environment", return_value=chosen):
        for _ in range(4):  # compares in the second and third
            step()
        if hvd.rank() == last:
            sources[0][1, 2].assign(0.5)
        with pytest.raises((errors.MismatchError, tf.errors.OpError), match="at step 4"):
            step()
    other = guard_options.parse("on_nonfinite=skip")
    told = pytest.raises(ValueError, match='HORORING_GUARD: on_nonfinite="skip" is for')
    with mock.patch.object(replicas, "from_environment", return_value=other), told:
        gradients_by(hvd.DistributedGradientTape, variables())


def case_a_guard_names_a_gradient_that_is_not_finite() -> None:
    if hvd.size() == 1:
        return
    sources, last = variables(), hvd.size() - 1
    scale = tf.Variable(np.float64(1.0), trainable=False)
    by_environment = guard_options.parse("every=0,on_nonfinite=error")

    def step() -> None:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(sources[0] ** 2) + tf.reduce_sum(sources[1] * scale)
        tape.gradient(loss, sources)

    told = rf"is NaN on rank {last} \(.*at step 2: \d+ of \d+ elements"
    for run in (step, tf.function(step)):
        guard = hvd.Guard(sources, every=0, on_nonfinite="error")
        for number in (1, 2, 3):
            scale.assign(math.nan if number == 2 and hvd.rank() == last else 1.0)
            run()
            if number != 2:
                guard.step()
                continue
            with pytest.raises(FloatingPointError, match=told):
                guard.step()
        (finding,) = guard.report()["findings"]
        assert finding["tensor"] == "kernel.2"
    sources = variables()
    run = tf.function(step)
    with mock.patch.object(replicas, "from_environment", return_value=by_environment):
        for number in (1, 2, 3):
            scale.assign(math.nan if number == 2 and hvd.rank() == last else 1.0)
            if number < 3:
                run()
        with pytest.raises((FloatingPointError, tf.errors.OpError), match=told):
            run()


def case_wrong_arguments_are_told() -> None:
    tape = tf.GradientTape()
    variable = tf.Variable(1.0)
    for error, options, text in (
        (ValueError, {"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op=Average only"),
        (ValueError, {"gradient_predivide_factor": 0.0}, "positive"),
        (TypeError, {"gradient_predivide_factor": None}, "must be a number"),
        (ValueError, {"groups": 0}, "at least 1"),
        (ValueError, {"groups": [variable]}, "list of lists"),
        (TypeError, {"groups": [["kernel"]]}, "groups takes variables, not str"),
        (ValueError, {"groups": [[variable], [variable]]}, "more than once"),
        (errors.UnsupportedOpError, {"op": 99}, "no reduce operation 99"),
        (TypeError, {"compression": 3}, "not a compressor"),
        (TypeError, {"device_dense": 3}, "device"),
    ):
        with pytest.raises(error, match=text):
            hvd.DistributedGradientTape(tape, **options)
    with pytest.raises(TypeError, match="GradientTape, not int"):
        hvd.DistributedGradientTape(3)
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tape))
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedGradientTape(tape, num_groups=2)
    with pytest.raises(ValueError, match="optimizer of Keras"):
        hvd.DistributedOptimizer(object())
    with pytest.raises(TypeError, match="name must be a str"):
        hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), name=3)


def case_wrong_arguments_are_told_by_the_same_exceptions_while_functions_are_traced() -> None:
    @tf.function
    def step(op: int) -> tf.Tensor:
        return hvd.allreduce(tf.ones([2]), op=op)

    with pytest.raises(errors.UnsupportedOpError, match="no reduce operation 99"):
        step(99)
    with pytest.raises(errors.NotInitializedError, match="not been initialized"):
        tf.function(lambda: raise_now(errors.NotInitializedError))()
    with pytest.raises(RuntimeError, match=r"allgather_object: .* tf\.function"):
        tf.function(lambda: hvd.allgather_object(1))()


def raise_now(error: type[Exception]) -> None:
    raise error


def case_ranks_that_differ_in_a_gradient_hear_of_it_and_go_on() -> None:
    if hvd.size() == 1:
        return
    sources = variables()
    shape = [3] if hvd.rank() == 0 else [4]
    other = tf.Variable(np.zeros(shape), name="other")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(other) + tf.reduce_sum(sources[0])
    with pytest.raises(errors.MismatchError, match=r"gradients/other.*rank 0: \[3\]"):
        hvd.DistributedGradientTape(tape).gradient(loss, [sources[0], other])
    for at, gradient in enumerate(gradients_by(hvd.DistributedGradientTape, sources)):
        np.testing.assert_array_equal(gradient, mean_of(at))


def case_variables_become_those_of_the_root() -> None:
    rank, size = hvd.rank(), hvd.size()
    root = size - 1
    kinds = [tf.float16, tf.float32, tf.float64, tf.int64, tf.bool, tf.uint32, tf.uint64]
    kinds += [tf.dtypes.experimental.float8_e5m2, tf.dtypes.experimental.float8_e4m3fn]

    def mine(of: int) -> list[np.ndarray]:
        return [np.full([2, at], of + 1, kind.as_numpy_dtype) for at, kind in enumerate(kinds)]

    for broadcast in (
        hvd.broadcast_variables,
        lambda v, root: hvd.broadcast_variables(v, root, inplace=True),
        tf.function(lambda v, root: hvd.broadcast_variables(v, root)),
        hvd.broadcast_,
    ):
        made = [tf.Variable(value) for value in mine(rank)]
        assert broadcast(made, root) in (None, made)
        for variable, wanted in zip(made, mine(root), strict=True):
            np.testing.assert_array_equal(variable.numpy(), wanted)
    layer = tf.keras.layers.Dense(3)
    layer.build((None, 2))
    hvd.broadcast_variables(layer.variables, root_rank=root)
    everybody = hvd.allgather(tf.reshape(layer.kernel, [1, -1])).numpy()
    assert (everybody == everybody[0]).all()
    assert hvd.broadcast_variables([], 0) is None
    with pytest.raises(TypeError, match="takes variables"):
        hvd.broadcast_variables([tf.ones(2)], 0)
    with pytest.raises(TypeError, match=r"\[variable\]"):
        hvd.broadcast_variables(made[0], 0)
    with pytest.raises(TypeError, match="root_rank"):
        hvd.broadcast_variables(made, "first")
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


def case_types_without_arithmetic_are_copied() -> None:
    rank, size = hvd.rank(), hvd.size()
    experimental = tf.dtypes.experimental
    for kind in (tf.uint32, tf.uint64, experimental.float8_e5m2, experimental.int4):
        of_rank = [np.full([size, 2], 1 + each, kind.as_numpy_dtype) for each in range(size)]
        mine = tf.constant(of_rank[rank], kind)

        def copies(mine: tf.Tensor = mine) -> list[tf.Tensor]:
            return [hvd.broadcast(mine, size - 1), hvd.allgather(mine), hvd.alltoall(mine)]

        def check(found: list[tf.Tensor], of_rank: list[Any] = of_rank) -> None:
            wanted = [of_rank[-1], np.concatenate(of_rank)]
            wanted.append(np.concatenate([each[rank : rank + 1] for each in of_rank]))
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(one.numpy(), other)

        check_both(copies, check)
    for call in (hvd.allreduce, hvd.reducescatter):
        with pytest.raises(ValueError, match="uint32 can be copied, not reduced; cast it to int64"):
            call(tf.ones([size], tf.uint32))


def case_objects_travel() -> None:
    assert hvd.broadcast_object({"rank": hvd.rank()}, hvd.size() - 1) == {"rank": hvd.size() - 1}
    assert hvd.broadcast_object_fn(root_rank=0)(hvd.rank()) == 0
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def case_the_topology_is_asked_when_the_graph_runs() -> None:
    def ask() -> list[tf.Tensor]:
        return [
            hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(),
            hvd.process_set_included_op(), hvd.size_op(0, name="how_many"),
        ]  # fmt: skip

    wanted = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), 1, hvd.size()]
    check_both(ask, lambda found: np.testing.assert_array_equal(found, wanted))
    with pytest.raises(ValueError, match="no process set 7"):
        hvd.size_op(7)


def case_an_interrupted_call_keeps_its_number() -> None:
    def interrupt(handle: int) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handles, "block_until_complete", interrupt)
        with pytest.raises(KeyboardInterrupt):
            hvd.allreduce(tf.ones([2]))
    np.testing.assert_array_equal(hvd.allreduce(tf.ones([2]), op=hvd.Sum), [hvd.size()] * 2)


def case_verbs_in_forward_mode() -> None:
    x = tf.constant([1.0, 2.0])

    def product() -> Any:
        with tf.autodiff.ForwardAccumulator(x, tf.ones([2])) as accumulator:
            y = hvd.allreduce(x * (hvd.rank() + 1.0), op=hvd.Sum)
        return accumulator.jvp(y)

    tangents = range(1, hvd.size() + 1)
    np.testing.assert_array_equal(product(), [sum(tangents)] * 2)


def case_layers_may_have_other_numbers_on_each_rank() -> None:
    # A rank that has loaded a model has created more layers than the others.
    number = 10 * hvd.rank()
    layers = [tf.Variable([1.0 + number], name=f"dense_{number + at}/kernel") for at in range(3)]
    hvd.broadcast_variables(layers, root_rank=0)
    assert [float(each[0]) for each in layers] == [1.0, 1.0, 1.0]
    # Optimizers of Keras name their variables after the path of a layer's.
    slots = [
        tf.Variable([1.0 + number], name=f"adam/dense_{number + at}_bias_velocity")
        for at in range(3)
    ]
    hvd.broadcast_variables(slots, root_rank=0)
    assert [float(each[0]) for each in slots] == [1.0, 1.0, 1.0]
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum((at + 1.0) * each) for at, each in enumerate(layers)])
    found = hvd.DistributedGradientTape(tape).gradient(loss, layers)
    assert [float(each[0]) for each in found] == [1.0, 2.0, 3.0]


def case_broadcasts_in_graphs_of_tensorflow_1_take_place() -> None:
    v1, root = tf.compat.v1, hvd.size() - 1
    for resource in (True, False):
        with tf.Graph().as_default(), v1.Session() as session:
            names = ("a", "b")
            made = [
                v1.get_variable(each, initializer=[float(hvd.rank())], use_resource=resource)
                for each in names
            ]
            (value,) = hvd.broadcast_(made[:1], root)
            operation = hvd.broadcast_variables(made[1:], root)
            for what, variable in zip((value, operation), made, strict=True):
                session.run(v1.global_variables_initializer())
                session.run(what)
                assert session.run(variable) == root
            assert session.run(value) == root
    variable = tf.Variable(float(hvd.rank()))
    for call in (hvd.broadcast_, hvd.broadcast_variables):
        variable.assign(float(hvd.rank()))
        tf.function(lambda call=call: call([variable], root) and None)()
        assert variable.numpy() == root


def case_sessions_of_tensorflow_1() -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=[1.0 + hvd.rank(), 2.0])
        other = v1.get_variable("other", initializer=2.0)
        optimizer = v1.train.GradientDescentOptimizer(1.0)
        assert hvd.DistributedOptimizer(optimizer) is optimizer
        assert isinstance(optimizer, v1.train.GradientDescentOptimizer)
        optimizer.register_local_var(other)
        loss = tf.reduce_sum(variable) * (hvd.rank() + 1.0) + other
        train = optimizer.minimize(loss)
        hook = hvd.BroadcastGlobalVariablesHook(hvd.size() - 1)
        with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            assert session.run(variable).tolist() == [hvd.size(), 2.0]
            session.run(train)
            step = (hvd.size() + 1) / 2
            assert session.run(variable).tolist() == [hvd.size() - step, 2.0 - step]
            assert session.run(other) == 2.0 - 1 / hvd.size()
        with pytest.raises(ValueError, match="optimizer of Keras"):
            hvd.DistributedOptimizer(v1.train.AdamOptimizer(), backward_passes_per_step=2)
        with pytest.raises(ValueError, match="op=Adasum"):
            hvd.DistributedOptimizer(v1.train.AdamOptimizer(), op=hvd.Adasum)
        with pytest.raises(ValueError, match="distributed already"):
            hvd.DistributedOptimizer(optimizer)
        with pytest.raises(NotImplementedError, match=r"DistributedGradientTape\(tape, weight=\)"):
            optimizer.weight = 2


def case_a_rank_that_is_asked_tells_what_it_does() -> None:
    hvd.allgather(tf.ones(3), name="before it is asked")
    multiply = tf.function(lambda matrix: matrix @ matrix)
    here = "in case_a_rank_that_is_asked_tells_what_it_does"
    told = asked_during(lambda: multiply(tf.ones((300, 300))), here)
    assert (told.events[-1].kind, told.events[-1].request) == (
        "done",
        "allgather 'before it is asked'",
    )
    hvd.allreduce(0.0)


test_training = session.on_ranks(globals(), 1, 2, 3, push=[2], session="tensorflow")
