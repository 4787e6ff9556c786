"""The core's C++ objects, driven from here: kernels, planner, coordinator, whole worlds.

They come from the module _testing (tests/module/module.cc), which `make test-cpp` builds, as it
builds mpi_transport_check. Each has an oracle in NumPy or plain Python that shares no code with
it.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import math
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import mpirun
import numpy as np
import pytest
import tiers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

BUILDS = [Path(__file__).parents[2] / "build" / preset for preset in ("editable", "release", "dev")]
DTYPES = {
    "uint8": 0,
    "int8": 1,
    "uint16": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bool": 9,
    "bfloat16": 10,
}
INTEGERS = ["uint8", "int8", "uint16", "int16", "int32", "int64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
AVERAGE, SUM, MIN, MAX, PRODUCT = 0, 1, 3, 4, 5
KERNELS = ["portable", "avx2", "avx512"]
ALLREDUCE, ALLGATHER, BROADCAST, BARRIER = range(4)

calmly = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def built(name: str) -> Path:
    found = [folder / name for folder in BUILDS if (folder / name).exists()]
    if not found:
        pytest.skip(f"{name} is not built (for this Python): make test-cpp builds it")
    return found[0]


@functools.cache
def load_core() -> ModuleType:
    path = built("_testing" + sysconfig.get_config_var("EXT_SUFFIX"))
    spec = importlib.util.spec_from_file_location("_testing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def core() -> ModuleType:
    return load_core()


# ---------------------------------------------------------------------------------------------
# Kernels


def widened(bits: np.ndarray) -> np.ndarray:
    """bfloat16, which NumPy lacks, is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrowed(numbers: np.ndarray) -> np.ndarray:
    """To the nearest bfloat16, ties to the even one."""
    bits = numbers.view(np.uint32)
    odd = bits >> 16 & 1
    rounded = ((bits.astype(np.uint64) + 0x7FFF + odd) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded)


def reduce_floats(
    dtype: str, op: int, prescale: float, postscale: float, sources: list[bytes]
) -> np.ndarray:
    """The result in the accumulation type, rounded to `dtype`, as float64."""
    wide = np.float64 if dtype == "float64" else np.float32
    if dtype == "bfloat16":
        read = [widened(np.frombuffer(source, np.uint16)) for source in sources]
    else:
        read = [np.frombuffer(source, dtype).astype(wide) for source in sources]
    with np.errstate(all="ignore"):
        if prescale != 1:
            read = [each * wide(prescale) for each in read]
        result = read[0]
        for each in read[1:]:
            if op in (SUM, AVERAGE):
                result = result + each
            elif op == PRODUCT:
                result = result * each
            else:
                better = result <= each if op == MIN else result >= each
                result = np.where(better | np.isnan(result), result, each)
        if op == AVERAGE:
            result = result / wide(len(sources))
        if postscale != 1:
            result = result * wide(postscale)
        if dtype == "bfloat16":
            return widened(narrowed(result)).astype(np.float64)
        return result.astype(dtype).astype(np.float64)


def as_float64(dtype: str, data: bytes) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling not-a-numbers
        if dtype == "bfloat16":
            return widened(np.frombuffer(data, np.uint16)).astype(np.float64)
        return np.frombuffer(data, dtype).astype(np.float64)


def scaled(value: int, factor: float, low: int, high: int) -> int:
    if factor == 1:
        return value
    product = float(value) * factor
    if math.isnan(product):
        return 0
    if product <= low:
        return low
    return high if product >= high else int(product)


def reduce_integers(
    dtype: str, op: int, prescale: float, postscale: float, sources: list[bytes]
) -> list[int]:
    """Python's integers do not wrap, so this says where the core's must."""
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    results = []
    for column in zip(*(np.frombuffer(source, dtype).tolist() for source in sources), strict=True):
        values = [scaled(value, prescale, low, high) for value in column]
        if op == MIN:
            value = min(values)
        elif op == MAX:
            value = max(values)
        elif op == AVERAGE:
            total = sum(values)
            value = abs(total) // len(values) * (1 if total >= 0 else -1)
        else:
            exact = sum(values) if op == SUM else math.prod(values)
            value = (exact - low) % (high - low + 1) + low
        results.append(scaled(value, postscale, low, high))
    return results


def reduce_bools(op: int, sources: list[bytes]) -> list[int]:
    read = [np.frombuffer(source, np.uint8) != 0 for source in sources]
    combine = np.logical_or if op in (SUM, MAX) else np.logical_and
    return combine.reduce(read).astype(int).tolist()


FACTORS = st.one_of(
    st.just(1.0),
    st.sampled_from([0.5, 1 / 3, -2.0, 1e-3, 1e10, 0.0]),
    st.floats(-100, 100, allow_nan=False),
)


@st.composite
def sources_of(draw: st.DrawFn, bytes_per_element: int) -> list[bytes]:
    """Any bits at all, in a number of elements around the widths of vectors and tiles."""
    count = draw(st.integers(1, 5))
    sizes = st.sampled_from([0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 65, 100, 2047, 4101])
    elements = draw(sizes)
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    sources = []
    for _ in range(count):
        data = bytearray(generator.bytes(elements * bytes_per_element))
        # Hypothesis picks some elements itself: zeros, infinities, the ends of the type.
        chosen = draw(st.lists(st.binary(min_size=bytes_per_element, max_size=bytes_per_element)))
        for place, value in enumerate(chosen[:elements]):
            data[place * bytes_per_element : (place + 1) * bytes_per_element] = value
        sources.append(bytes(data))
    return sources


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest, core: ModuleType):
    before = core.kernels_in_use()
    if not core.set_kernels(request.param):
        pytest.skip(f"this processor has no {request.param}")
    assert core.kernels_in_use() == request.param
    yield request.param
    core.set_kernels(before)


forgiving = settings(
    deadline=None,
    max_examples=60,
    # The fixture sets the kernels once for all examples, which is what is wanted.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", FLOATS)
@forgiving
@given(data=st.data())
def test_floats_are_reduced_as_by_numpy(core: ModuleType, dtype: str, data: st.DataObject):
    sources = data.draw(sources_of({"float64": 8, "float32": 4}.get(dtype, 2)))
    op = data.draw(st.sampled_from([AVERAGE, SUM, MIN, MAX, PRODUCT]))
    prescale, postscale = data.draw(FACTORS), data.draw(FACTORS)
    spec = core.ReduceSpec(DTYPES[dtype], op, prescale, postscale)
    got = as_float64(dtype, core.reduce(spec, sources))
    expected = reduce_floats(dtype, op, prescale, postscale, sources)
    # Not-a-number equals not-a-number here, and the sign of zero counts.
    np.testing.assert_array_equal(got, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(expected[numbers]))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", INTEGERS)
@forgiving
@given(data=st.data())
def test_integers_are_reduced_as_by_python(core: ModuleType, dtype: str, data: st.DataObject):
    sources = data.draw(sources_of(np.dtype(dtype).itemsize))
    op = data.draw(st.sampled_from([AVERAGE, SUM, MIN, MAX, PRODUCT]))
    prescale, postscale = data.draw(FACTORS), data.draw(FACTORS)
    spec = core.ReduceSpec(DTYPES[dtype], op, prescale, postscale)
    got = np.frombuffer(core.reduce(spec, sources), dtype).tolist()
    assert got == reduce_integers(dtype, op, prescale, postscale, sources)


@pytest.mark.usefixtures("kernels")
@forgiving
@given(data=st.data())
def test_any_byte_but_zero_is_true(core: ModuleType, data: st.DataObject):
    sources = data.draw(sources_of(1))
    op = data.draw(st.sampled_from([SUM, MIN, MAX, PRODUCT]))
    if len(sources) == 1:
        sources *= 2
    got = core.reduce(core.ReduceSpec(DTYPES["bool"], op), sources)
    assert list(got) == reduce_bools(op, sources)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_float_is_kept_and_every_half_is_rounded_to_even(core: ModuleType, dtype: str):
    """All 65,536 values; and each of them plus half of the distance to the next one."""
    every = np.arange(1 << 16, dtype=np.uint16)
    kept = core.reduce(core.ReduceSpec(DTYPES[dtype], MAX), [every.tobytes()] * 2)
    np.testing.assert_array_equal(as_float64(dtype, kept), as_float64(dtype, every.tobytes()))
    following = np.roll(every, -1)
    sources = [every.tobytes(), following.tobytes()]
    got = core.reduce(core.ReduceSpec(DTYPES[dtype], AVERAGE), sources)
    expected = reduce_floats(dtype, AVERAGE, 1, 1, sources)
    np.testing.assert_array_equal(as_float64(dtype, got), expected)


def test_sixteen_bit_sums_are_rounded_once(core: ModuleType):
    """1 + 2^-11 rounds to 1 in float16; of several such, none is lost on the way."""
    one, small = np.float16(1).tobytes(), np.float16(2**-11).tobytes()
    spec = core.ReduceSpec(DTYPES["float16"], SUM)
    (got,) = np.frombuffer(core.reduce(spec, [one, small, small]), np.float16)
    assert got == np.float16(1 + 2**-10)


# ---------------------------------------------------------------------------------------------
# Fusion planner

ITEMS = st.lists(st.tuples(st.sampled_from([4, 6, 7, 8]), st.integers(0, 3000)), max_size=40)


def padded(size: int) -> int:
    return -(-size // 64) * 64


@calmly
@given(items=ITEMS, fusion=st.integers(0, 5000))
def test_a_plan_keeps_its_invariants(items: list[tuple[int, int]], fusion: int):
    plan = load_core().plan_fusion(items, fusion)
    # 1. every item once; within a batch by type, in the order in which types and items come
    assert sorted(i for batch in plan for i in batch) == list(range(len(items)))
    for batch in plan:
        types = list(dict.fromkeys(items[i][0] for i in sorted(batch)))
        assert batch == sorted(batch, key=lambda i: (types.index(items[i][0]), i))
    # 2. within the bound, or alone
    for batch in plan:
        assert len(batch) == 1 or sum(padded(items[i][1]) for i in batch) <= fusion
    # 3. batches by their first items
    firsts = [batch[0] for batch in plan]
    assert firsts == sorted(firsts)
    # And no batch was begun that its first item could have done without.
    for before, first in zip(plan, firsts[1:], strict=False):
        bytes_before = sum(padded(items[i][1]) for i in before if i < first)
        assert not fusion or bytes_before + padded(items[first][1]) > fusion


@calmly
@given(items=ITEMS)
def test_without_fusion_everything_goes_alone(items: list[tuple[int, int]]):
    assert load_core().plan_fusion(items, 0) == [[i] for i in range(len(items))]


@calmly
@given(items=ITEMS)
def test_with_room_for_all_there_is_one_batch_for_all_types(items: list[tuple[int, int]]):
    assert len(load_core().plan_fusion(items, 1 << 40)) == min(1, len(items))


# ---------------------------------------------------------------------------------------------
# Coordinator

RUN, FAIL, LEAVE = 0, 1, 2


class Ranks:
    """The other side of a coordinator: ranks that remember ids as response caches do."""

    def __init__(self, core: ModuleType, size: int, **options: int) -> None:
        self.core = core
        self.size = size
        self.coordinator = core.Coordinator(size=size, **options)
        self.ids: dict[str, tuple[int, tuple]] = {}  # by name, what it stands for
        self.names: dict[int, str] = {}
        self.cached_reports = 0

    def report(self, rank: int, name: str, what: tuple, now: int = 0) -> None:
        """`what`: dtype and shape."""
        known, cached = self.ids.get(name, (0, ()))
        if known and cached == what:
            self.cached_reports += 1
            self.coordinator.receive(rank, cached=[known], now=now)
            return
        dtype, shape = what
        request = self.core.Request(name, ALLREDUCE, dtype, list(shape), SUM)
        self.coordinator.receive(rank, fresh=[request], now=now)

    def take(self, wanted: dict[str, dict[int, tuple]]) -> dict[str, str]:
        """What is decided by now: the error of each name, "" for none."""
        outcomes: dict[str, str] = {}
        for decision in self.coordinator.decide():
            name = decision.name or self.names[decision.cache_id]
            assert name not in outcomes
            if decision.kind == RUN:
                outcomes[name] = ""
                if decision.name and decision.cache_id:
                    self.ids[name] = decision.cache_id, wanted[name][0]
                    self.names[decision.cache_id] = name
            else:
                assert decision.kind == FAIL
                assert decision.message
                outcomes[name] = decision.message
        return outcomes


METADATA = st.tuples(st.sampled_from([7, 8]), st.lists(st.integers(1, 4), max_size=2).map(tuple))


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_every_request_is_decided_once_when_all_ranks_have_reported_it(data: st.DataObject):
    size = data.draw(st.integers(1, 5))
    capacity = data.draw(st.integers(0, 4))
    ranks = Ranks(load_core(), size, cache_capacity=capacity)
    names = [f"n{i}" for i in range(data.draw(st.integers(1, 6)))]
    what = {name: data.draw(METADATA) for name in names}
    for _ in range(data.draw(st.integers(1, 4))):
        # Some requests change, on all ranks or on one.
        for name in data.draw(st.sets(st.sampled_from(names))):
            what[name] = data.draw(METADATA)
        wanted = {name: dict.fromkeys(range(size), what[name]) for name in names}
        for name in data.draw(st.sets(st.sampled_from(names))):
            wanted[name][data.draw(st.integers(0, size - 1))] = data.draw(METADATA)
        reports = data.draw(st.permutations([(r, name) for r in range(size) for name in names]))
        count: collections.Counter[str] = collections.Counter()
        outcomes: dict[str, str] = {}
        for rank, name in reports:
            ranks.report(rank, name, wanted[name][rank])
            count[name] += 1
            waiting = sorted(each for each in count if count[each] < size)
            assert ranks.coordinator.waiting() == waiting
            new = ranks.take(wanted)
            assert set(new) == ({name} if count[name] == size else set())
            outcomes |= new
        for name in names:
            agree = len(set(wanted[name].values())) == 1
            assert (outcomes[name] == "") == agree, outcomes[name]
            if not agree:
                assert f"'{name}'" in outcomes[name]
                assert "differ" in outcomes[name]


def test_a_request_that_is_repeated_is_reported_by_its_number():
    ranks = Ranks(load_core(), 3, cache_capacity=8)
    wanted = {name: dict.fromkeys(range(3), (7, (4,))) for name in ("a", "b")}
    for _ in range(5):
        for name in wanted:
            for rank in range(3):
                ranks.report(rank, name, (7, (4,)))
        assert ranks.take(wanted) == {"a": "", "b": ""}
    assert ranks.cached_reports == 4 * 2 * 3


@calmly
@given(data=st.data())
def test_the_text_of_a_mismatch_does_not_depend_on_who_came_first(data: st.DataObject):
    core = load_core()
    size = data.draw(st.integers(2, 6))
    shapes = data.draw(
        st.lists(st.sampled_from([(2,), (3,), (2, 2)]), min_size=size, max_size=size)
    )
    if len(set(shapes)) == 1:
        shapes[0] = (9,)
    texts = set()
    for _ in range(3):
        ranks = Ranks(core, size)
        for rank in data.draw(st.permutations(range(size))):
            ranks.report(rank, "layer", (7, shapes[rank]))
        texts |= set(ranks.take({}).values())
    (text,) = texts
    for shape in shapes:
        assert str(list(shape)) in text


@pytest.mark.parametrize("later", [False, True])
def test_what_all_have_reported_is_not_held_back(later: bool):
    """Ranks let requests come together; there is nothing to wait for when they have said them."""
    ranks = Ranks(load_core(), 2)
    wanted = {name: dict.fromkeys(range(2), (7, (40,))) for name in ("first", "second")}
    ranks.report(0, "first", (7, (40,)))
    if later:
        ranks.report(0, "second", (7, (40,)))
    ranks.report(1, "first", (7, (40,)))
    assert ranks.take(wanted) == {"first": ""}


def test_after_a_rank_has_left_nothing_is_decided():
    core = load_core()
    ranks = Ranks(core, 2)
    ranks.report(0, "x", (7, (4,)))
    ranks.coordinator.receive(1, leaving=True)
    (decision,) = ranks.coordinator.decide()
    assert decision.kind == LEAVE
    assert "rank 1" in decision.message
    ranks.report(1, "x", (7, (4,)))
    assert ranks.coordinator.decide() == []


@calmly
@given(rows=st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_an_allgather_tells_everybody_the_rows_of_each_rank(rows: list[int]):
    core = load_core()
    coordinator = core.Coordinator(size=len(rows))
    for rank, count in enumerate(rows):
        request = core.Request("g", ALLGATHER, 7, [count, 3])
        coordinator.receive(rank, fresh=[request])
    (decision,) = coordinator.decide()
    assert decision.kind == RUN
    assert decision.rows == rows


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        ({"kind": ALLREDUCE}, {"kind": BROADCAST}, "allreduce"),
        ({"op": SUM}, {"op": MAX}, "Max"),
        ({"dtype": 7}, {"dtype": 8}, "float64"),
        ({"shape": [2, 3]}, {"shape": [3, 2]}, "[3, 2]"),
        ({"kind": BROADCAST, "root": 0}, {"kind": BROADCAST, "root": 1}, "root 1"),
        (
            {"kind": ALLGATHER, "shape": [1, 2]},
            {"kind": ALLGATHER, "shape": [1, 3]},
            "[*, 3]",
        ),
    ],
)
def test_ranks_that_differ_are_told_in_what(one: dict, other: dict, what: str):
    core = load_core()
    coordinator = core.Coordinator(size=3)
    for rank, options in enumerate([one, other, one]):
        coordinator.receive(rank, fresh=[core.Request("x", **options)])
    (decision,) = coordinator.decide()
    assert decision.kind == FAIL
    assert what in decision.message
    assert "rank 1" in decision.message
    assert "ranks 0,2" in decision.message


# ---------------------------------------------------------------------------------------------
# Whole worlds: ranks as threads of this process


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_world_reduces_whatever_the_order_of_submission(data: st.DataObject):
    core = load_core()
    size = data.draw(st.sampled_from([1, 2, 3, 5, 8]))
    sizes = {
        f"t{i}": n
        for i, n in enumerate(
            data.draw(
                st.lists(
                    st.sampled_from([0, 1, 2, 3, 5, 7, 8, 9, 1000, 65_537]), min_size=1, max_size=8
                )
            )
        )
    }
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    values = {
        name: generator.integers(-(2**40), 2**40, (size, count)) for name, count in sizes.items()
    }
    submissions = [
        [(name, values[name][rank].tobytes()) for name in data.draw(st.permutations(list(sizes)))]
        for rank in range(size)
    ]
    fusion = data.draw(st.sampled_from([0, 64, 1000, 1 << 20]))
    capacity = data.draw(st.sampled_from([0, 1, 100]))
    steps = data.draw(st.integers(1, 3))
    spec = core.ReduceSpec(DTYPES["int64"], SUM)
    results = core.play_world(submissions, spec, fusion, capacity, steps)
    assert len(results) == size
    for mine in results:
        assert len(mine) == len(sizes)
        for name, got in mine:
            np.testing.assert_array_equal(np.frombuffer(got, np.int64), values[name].sum(0))


@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_all_ranks_of_a_world_hold_the_same_bits(data: st.DataObject):
    core = load_core()
    size = data.draw(st.sampled_from([2, 3, 5]))
    dtype = data.draw(st.sampled_from(["float16", "bfloat16", "float32", "float64"]))
    item = {"float64": 8, "float32": 4}.get(dtype, 2)
    elements = data.draw(st.sampled_from([1, 7, 1001]))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    numbers = [generator.normal(size=elements).astype(np.float32) for _ in range(size)]
    if dtype == "bfloat16":
        inputs = [narrowed(each).tobytes() for each in numbers]
    else:
        inputs = [each.astype(dtype).tobytes() for each in numbers]
    spec = core.ReduceSpec(DTYPES[dtype], AVERAGE)
    results = core.play_world([[("x", each)] for each in inputs], spec, 1 << 20, 8, 2)
    assert len({mine[0][1] for mine in results}) == 1
    got = as_float64(dtype, results[0][0][1])
    assert len(results[0][0][1]) == elements * item
    # Sums of a few numbers of order 1, in whatever order: some units in the last place.
    unit = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23, "float64": 2**-52}[dtype]
    exact = np.mean([as_float64(dtype, each) for each in inputs], axis=0)
    np.testing.assert_allclose(got, exact, rtol=2 * unit, atol=8 * size * unit)


@settings(deadline=None, max_examples=10)
@given(odd=st.integers(0, 3), steps=st.integers(1, 3))
def test_one_mismatch_in_a_world_fails_everywhere_and_alone(odd: int, steps: int):
    core = load_core()
    good = np.arange(10, dtype=np.int64).tobytes()
    submissions = [
        [("good", good), ("bad", good if rank != odd else good[:16]), ("fine", good)]
        for rank in range(4)
    ]
    results = core.play_world(submissions, core.ReduceSpec(5, SUM), 1 << 20, 8, steps)
    texts = set()
    for mine in results:
        outcome = dict(mine)
        assert np.frombuffer(outcome["good"], np.int64).tolist() == [4 * i for i in range(10)]
        assert outcome["fine"] == outcome["good"]
        texts.add(outcome["bad"])
    (text,) = texts
    assert f"rank {odd}: [2]" in text.decode()


# ---------------------------------------------------------------------------------------------
# Transports, under mpirun


@pytest.mark.parametrize("size", tiers.choose([2, 3, 4], push=[3]))
def test_transports_between_processes_conform(size: int):
    program = built("mpi_transport_check")
    environ = {**os.environ, **mpirun.LAUNCH_ENVIRONMENT}
    launcher = shutil.which(
        "mpirun", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    )
    assert launcher, "mpirun is not on the PATH"
    done = subprocess.run(
        [launcher, "-np", str(size), str(program)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=110,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert output.count(" 0 failed") == size, output
