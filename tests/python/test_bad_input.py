"""Bad input of every verb, on NumPy arrays and torch tensors.

What is wrong on one rank alone is refused there, at once; what ranks disagree about is told to all
of them. Either way the text says which tensor, rank and value, and the job goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import mpirun
import numpy as np
import pytest

import hororing.numpy
from hororing import errors

try:
    import torch

    import hororing.torch
except ImportError:
    torch = None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Front:
    """One framework: its verbs and how its arrays are made."""

    name: str
    hvd: Any
    array: Callable[..., Any]  # (data, dtype name)

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.hvd, verb)

    def ones(self, *shape: int, dtype: str = "float32") -> Any:
        return self.array(np.ones(shape), dtype)

    def rows(self, *per_rank: int, dtype: str = "float32") -> Any:
        """As many rows as there are ranks, of that shape."""
        return self.ones(self.hvd.size(), *per_rank, dtype=dtype)


def fronts() -> list[Front]:
    found = [Front("numpy", hororing.numpy, lambda data, dtype: np.asarray(data).astype(dtype))]
    if torch is not None:

        def tensor(data: Any, dtype: str) -> Any:
            return torch.as_tensor(data).to(getattr(torch, dtype))

        found.append(Front("torch", hororing.torch, tensor))
    return found


Call = Callable[[Front], Any]
Row = tuple[str, Call, type[Exception], tuple[str, ...]]

# ---------------------------------------------------------------------------------------------
# What every verb refuses: each verb with one tensor, and other arguments that are right

VERBS: dict[str, Callable[..., Any]] = {
    "allreduce": lambda f, x, **more: f.allreduce(x, **more),
    "allreduce_": lambda f, x, **more: f.allreduce_(x, **more),
    "allreduce_async": lambda f, x, **more: f.allreduce_async(x, **more),
    "allreduce_async_": lambda f, x, **more: f.allreduce_async_(x, **more),
    "grouped_allreduce": lambda f, x, **more: f.grouped_allreduce([x], **more),
    "grouped_allreduce_": lambda f, x, **more: f.grouped_allreduce_([x], **more),
    "grouped_allreduce_async": lambda f, x, **more: f.grouped_allreduce_async([x], **more),
    "grouped_allreduce_async_": lambda f, x, **more: f.grouped_allreduce_async_([x], **more),
    "broadcast": lambda f, x, **more: f.broadcast(x, 0, **more),
    "broadcast_": lambda f, x, **more: f.broadcast_(x, 0, **more),
    "broadcast_async": lambda f, x, **more: f.broadcast_async(x, 0, **more),
    "broadcast_async_": lambda f, x, **more: f.broadcast_async_(x, 0, **more),
    "allgather": lambda f, x, **more: f.allgather(x, **more),
    "allgather_async": lambda f, x, **more: f.allgather_async(x, **more),
    "grouped_allgather": lambda f, x, **more: f.grouped_allgather([x], **more),
    "grouped_allgather_async": lambda f, x, **more: f.grouped_allgather_async([x], **more),
    "alltoall": lambda f, x, **more: f.alltoall(x, **more),
    "alltoall_async": lambda f, x, **more: f.alltoall_async(x, **more),
    "reducescatter": lambda f, x, **more: f.reducescatter(x, **more),
    "reducescatter_async": lambda f, x, **more: f.reducescatter_async(x, **more),
    "grouped_reducescatter": lambda f, x, **more: f.grouped_reducescatter([x], **more),
    "grouped_reducescatter_async": lambda f, x, **more: f.grouped_reducescatter_async([x], **more),
}
REDUCING = [verb for verb in VERBS if "reduce" in verb]
WITH_OP = [verb for verb in REDUCING if "scatter" not in verb]


def said_by(verb: str) -> str:
    """The verb as messages call it: without what concerns the way it is called."""
    return verb.removesuffix("_").removesuffix("_async")


def refused_by_every_verb(front: Front) -> Iterator[tuple[Any, type[Exception], str]]:
    """(what is not a tensor that verbs take, exception, text)."""
    for other in (1.5, [1.0, 2.0], "text", None):
        yield other, TypeError, type(other).__name__
    if front.name == "numpy":
        yield np.ones(2, np.complex64), ValueError, "complex64"
        yield np.array([None, "x"]), ValueError, "object"
        yield np.ones(2, np.dtype(np.float32).newbyteorder()), ValueError, "byte order"
        yield np.ma.masked_array(np.ones(2)), ValueError, "masked"
        yield np.array(["2020-01-01"], "datetime64[D]"), ValueError, "datetime64"
        if torch is not None:
            yield torch.ones(2), TypeError, "Tensor"
    else:
        yield np.ones(2), TypeError, "ndarray"
        yield torch.ones(2).to(torch.float8_e5m2), ValueError, "float8_e5m2"
        yield torch.ones(2).to_sparse(), ValueError, "sparse"
        yield torch.ones(2, device="meta"), ValueError, "META"
        if hasattr(torch, "float8_e4m3fn"):
            yield torch.ones(2).to(torch.float8_e4m3fn), ValueError, "float8_e4m3fn"


# ---------------------------------------------------------------------------------------------
# Arguments that are wrong on one rank alone. Every rank has them here, or one only.

LOCAL: list[Row] = [
    ("no tensors", lambda f: f.grouped_allreduce([]), ValueError, ("grouped_allreduce",)),
    ("no tensors", lambda f: f.grouped_allgather([]), ValueError, ("grouped_allgather",)),
    ("no tensors", lambda f: f.grouped_reducescatter([]), ValueError, ("grouped_reducescatter",)),
    ("no dimensions", lambda f: f.allgather(f.ones(), name="n"), ValueError, ("'n'", "dimensions")),
    ("no dimensions", lambda f: f.alltoall(f.ones(), name="n"), ValueError, ("'n'", "dimensions")),
    ("no dimensions", lambda f: f.reducescatter(f.ones()), ValueError, ("dimensions",)),
    (
        "no dimensions",
        lambda f: f.grouped_allgather([f.ones(2), f.ones()], name="n"),
        ValueError,
        ("'n'", "dimensions"),
    ),
    ("root", lambda f: f.broadcast(f.ones(2), -1, name="n"), ValueError, ("'n'", "-1", "root")),
    ("root", lambda f: f.broadcast(f.ones(2), 7, name="n"), ValueError, ("'n'", "7", "ranks 0 to")),
    ("root", lambda f: f.broadcast(f.ones(2), 2**40, name="n"), ValueError, (str(2**40),)),
    ("root", lambda f: f.broadcast(f.ones(2), "0"), TypeError, ("root_rank", "str")),
    ("root", lambda f: f.broadcast(f.ones(2), 0.0), TypeError, ("root_rank", "float")),
    ("name", lambda f: f.allreduce(f.ones(2), name=3), TypeError, ("name", "int")),
    ("name", lambda f: f.allreduce(f.ones(2), name="a\0b"), ValueError, ("zero character",)),
    ("name", lambda f: f.allreduce(f.ones(2), name=""), ValueError, ("name is empty",)),
    ("average", lambda f: f.allreduce(f.ones(2), average=True, op=1), ValueError, ("average",)),
    (
        "bool",
        lambda f: f.allreduce(f.ones(2, dtype="bool"), name="n"),
        ValueError,
        ("'n'", "Average of bool"),
    ),
    (
        "bool",
        lambda f: f.reducescatter(f.ones(2, dtype="bool"), name="n"),
        ValueError,
        ("'n'", "Average of bool"),
    ),
    (
        "factor",
        lambda f: f.allreduce(f.ones(2), prescale_factor="2"),
        TypeError,
        ("prescale_factor", "str"),
    ),
    (
        "factor",
        lambda f: f.reducescatter(f.ones(2), name="n", postscale_factor=float("inf")),
        ValueError,
        ("'n'", "finite"),
    ),
    (
        "Adasum of integers",
        lambda f: f.allreduce(f.ones(2, dtype="int32"), name="n", op=f.hvd.Adasum),
        (ValueError, NotImplementedError),  # type: ignore[arg-type]
        ("Adasum",),
    ),
    (
        "uneven",
        lambda f: f.alltoall(f.ones(f.size() + 1) if f.size() > 1 else f.ones(), name="n"),
        ValueError,
        ("'n'",),
    ),
]


def splits_rows(size: int) -> list[Row]:
    """Splits for tensors of 2 rows per rank, all wrong."""
    wrong: list[tuple[str, Any, tuple[str, ...]]] = [
        ("too many rows", [3] + [2] * (size - 1), ("'n'", "more rows", f"[{2 * size}, 3]")),
        ("too short", [2] * (size - 1), ("'n'", f"one entry for each of {size}")),
        ("too long", [0] * (size + 1), ("'n'", f"one entry for each of {size}")),
        ("none at all", [], ("'n'", f"one entry for each of {size}")),
        ("negative", [-1] + [0] * (size - 1), ("'n'", "negative", "-1")),
        ("sum overflows", [2**62] * size, ("'n'", "more rows")),
        ("beyond 64 bits", [2**70] + [0] * (size - 1), ("'n'", str(2**70))),
        ("floats", [1.0] * size, ("list of integers",)),
        ("text", ["1"] * size, ("list of integers",)),
        ("two dimensions", [[1]] * size, ("list of integers",)),
        ("a number", 2, ("list of integers",)),
    ]
    return [
        (label, functools.partial(sent_with, splits), ValueError, texts)
        for label, splits, texts in wrong
    ]


def sent_with(splits: Any, front: Front) -> Any:
    return front.alltoall(front.ones(2 * front.size(), 3), splits, name="n")


def typed_splits(front: Front) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Splits as arrays of the framework."""
    size = front.size()
    yield front.ones(size, dtype="int64"), ("int32", "int64")
    yield front.ones(size, dtype="float32"), ("int32", "float32")
    yield front.ones(size, 1, dtype="int32"), ("one dimension", "2")
    yield front.ones(size + 1, dtype="int32"), (f"one entry for each of {size}",)


# ---------------------------------------------------------------------------------------------
# What ranks disagree about: the call of most, and of the odd one; what the text says of it

DIFFERENT: list[tuple[str, Call, Call, str, str]] = [
    (
        "shapes differ",
        lambda f: f.allreduce(f.ones(2, 3), name="n"),
        lambda f: f.allreduce(f.ones(3, 2), name="n"),
        "[2, 3]",
        "[3, 2]",
    ),
    (
        "data types differ",
        lambda f: f.allreduce_(f.ones(2), name="n"),
        lambda f: f.allreduce_(f.ones(2, dtype="float64"), name="n"),
        "float32",
        "float64",
    ),
    (
        "reduce operations differ",
        lambda f: f.grouped_allreduce([f.ones(2)], name="n", op=f.hvd.Sum),
        lambda f: f.grouped_allreduce([f.ones(2)], name="n", op=f.hvd.Max),
        "Sum",
        "Max",
    ),
    (
        "scale factors differ",
        lambda f: f.allreduce(f.ones(2), name="n", prescale_factor=0.5),
        lambda f: f.allreduce(f.ones(2), name="n", prescale_factor=0.25),
        "prescale 0.5, postscale 1",
        "prescale 0.25, postscale 1",
    ),
    (
        "operations differ",
        lambda f: f.allreduce(f.ones(2), name="n"),
        lambda f: f.broadcast(f.ones(2), 0, name="n"),
        "allreduce",
        "broadcast",
    ),
    (
        "operations differ",
        lambda f: f.alltoall(f.rows(), name="n"),
        lambda f: f.reducescatter(f.rows(), name="n"),
        "alltoall",
        "reducescatter",
    ),
    (
        "trailing dimensions differ",
        lambda f: f.allgather(f.ones(2, 3), name="n"),
        lambda f: f.allgather(f.ones(5, 4), name="n"),
        "[*, 3]",
        "[*, 4]",
    ),
    (
        "numbers of dimensions differ",
        lambda f: f.allgather(f.ones(2), name="n"),
        lambda f: f.allgather(f.ones(2, 1), name="n"),
        "1 dimension",
        "2 dimensions",
    ),
    (
        "numbers of tensors in the group differ",
        lambda f: f.grouped_allgather([f.ones(2)] * 2, name="n"),
        lambda f: f.grouped_allgather([f.ones(2)] * 3, name="n"),
        "2 tensors",
        "3 tensors",
    ),
    (
        "shapes differ",
        lambda f: f.broadcast(f.ones(2), 0, name="n"),
        lambda f: f.broadcast(f.ones(3), 0, name="n"),
        "[2]",
        "[3]",
    ),
    (
        "root ranks differ",
        lambda f: f.broadcast_(f.ones(2), 0, name="n"),
        lambda f: f.broadcast_(f.ones(2), 1, name="n"),
        "root 0",
        "root 1",
    ),
    (
        "data types differ",
        lambda f: f.alltoall(f.rows(), name="n"),
        lambda f: f.alltoall(f.rows(dtype="int32"), name="n"),
        "float32",
        "int32",
    ),
    (
        "trailing dimensions differ",
        lambda f: f.alltoall(f.rows(2), name="n"),
        lambda f: f.alltoall(f.rows(3), [0] * f.size(), name="n"),
        "[*, 2]",
        "[*, 3]",
    ),
    (
        "numbers of dimensions differ",
        lambda f: f.alltoall(f.rows(2), name="n"),
        lambda f: f.alltoall(f.rows(2, 1), name="n"),
        "2 dimensions",
        "3 dimensions",
    ),
    (
        "shapes differ",
        lambda f: f.reducescatter(f.ones(5), name="n"),
        lambda f: f.reducescatter(f.ones(6), name="n"),
        "[5]",
        "[6]",
    ),
    (
        "data types differ",
        lambda f: f.reducescatter(f.ones(5), name="n"),
        lambda f: f.reducescatter(f.ones(5, dtype="int64"), name="n"),
        "float32",
        "int64",
    ),
    (
        "reduce operations differ",
        lambda f: f.reducescatter(f.ones(5), name="n"),
        lambda f: f.reducescatter(f.ones(5), name="n", op=f.hvd.Sum),
        "Average",
        "Sum",
    ),
    (
        "scale factors differ",
        lambda f: f.grouped_reducescatter([f.ones(5)], name="n"),
        lambda f: f.grouped_reducescatter([f.ones(5)], name="n", postscale_factor=2.0),
        "prescale 1, postscale 1",
        "prescale 1, postscale 2",
    ),
    (
        "shapes of tensor 1 of the group differ",
        lambda f: f.grouped_reducescatter([f.ones(5), f.ones(2)], name="n"),
        lambda f: f.grouped_reducescatter([f.ones(5), f.ones(3)], name="n"),
        "[2]",
        "[3]",
    ),
]

# ---------------------------------------------------------------------------------------------
# On the ranks


@contextlib.contextmanager
def refused(what: str, kind: Any, *texts: str) -> Iterator[None]:
    """Fail unless the block raises that, and all texts occur in its message."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        yield
    error = caught.value
    assert isinstance(error, kind), f"{what}: {type(error).__name__}: {error}"
    missing = [text for text in texts if text not in str(error)]
    assert not missing, f"{what}: {missing} not in: {error}"


def works(front: Front) -> None:
    """The next collective does, on all ranks."""
    total = front.allreduce(front.ones(3), op=front.hvd.Sum)
    assert [float(number) for number in total] == [front.size()] * 3


def case_before_init() -> None:
    for front in fronts():
        for verb, call in VERBS.items():
            with refused(f"{front.name} {verb}", errors.NotInitializedError, "hvd.init()"):
                call(front, front.ones(2))
        for other in (front.barrier, front.join, front.rank):
            with refused(front.name, errors.NotInitializedError, "hvd.init()"):
                other()
        with refused(front.name, errors.NotInitializedError, "hvd.init()"):
            front.add_process_set([0])


def case_init() -> None:
    hororing.numpy.init(process_sets="dynamic")


def case_what_is_not_a_tensor_of_ours() -> None:
    for front in fronts():
        for verb, call in VERBS.items():
            for bad, kind, text in refused_by_every_verb(front):
                with refused(f"{front.name} {verb} of {bad!r}", kind, said_by(verb), text):
                    call(front, bad)
        works(front)


def case_operations_that_do_not_exist() -> None:
    for front in fronts():
        for verb in REDUCING:
            for op in (99, -1, "Sum", 1.5):
                with refused(f"{front.name} {verb} {op}", errors.UnsupportedOpError, repr(op)):
                    VERBS[verb](front, front.ones(2), op=op)
        for verb in set(REDUCING) - set(WITH_OP):
            for op, name in ((2, "Adasum"), (3, "Min"), (4, "Max"), (5, "Product")):
                with refused(
                    f"{front.name} {verb}", errors.UnsupportedOpError,
                    said_by(verb), f"op={name}", "Average or Sum",
                ):  # fmt: skip
                    VERBS[verb](front, front.ones(2), op=op)
        for verb in WITH_OP:
            if front.size() == 3:
                with refused(f"{front.name} {verb}", NotImplementedError, "power of two, not 3"):
                    VERBS[verb](front, front.ones(2), op=front.hvd.Adasum)
        works(front)


def case_process_sets_that_one_cannot_use() -> None:
    for front in fronts():
        own = [front.add_process_set({*range(front.size())} - {r}) for r in range(front.size())]
        not_mine = own[front.rank()]
        for verb, call in VERBS.items():
            name = said_by(verb)
            for bad in (None, 0, [0]):
                with refused(f"{front.name} {verb}", TypeError, name, "process_set"):
                    call(front, front.ones(2), process_set=bad)
            with refused(f"{front.name} {verb}", TypeError, name, "not registered"):
                call(front, front.ones(2), process_set=front.ProcessSet([0]))
            with refused(
                f"{front.name} {verb}", ValueError, name, f"rank {front.rank()} is not a member",
                str(not_mine.ranks),
            ):  # fmt: skip
                call(front, front.ones(2), process_set=not_mine)
        works(front)
        assert all(front.remove_process_set(each) for each in own)


def case_arguments_that_are_wrong_here() -> None:
    for front in fronts():
        for label, call, kind, texts in [*LOCAL, *splits_rows(front.size())]:
            with refused(f"{front.name}: {label}", kind, *texts):
                call(front)
            works(front)
        for splits, texts in typed_splits(front):
            with refused(f"{front.name}: splits {splits}", ValueError, *texts):
                front.alltoall(front.rows(), splits, name="n")
        for bad in ([2**70], [-(2**70)]):
            with refused(f"{front.name}: add_process_set({bad})", ValueError, str(bad[0])):
                front.add_process_set(bad)
        works(front)


def case_arguments_that_are_wrong_on_one_rank_only() -> None:
    """The others wait for that rank's next try."""
    for front in fronts():
        size = front.size()
        for odd in range(size):
            for label, call, kind, texts in [*LOCAL, *splits_rows(size)]:
                if front.rank() == odd:
                    with refused(f"{front.name}: {label}", kind, *texts):
                        call(front)
                front.alltoall(front.rows(), name="n")
                front.allreduce(front.ones(2), name="n")


def case_unnamed_calls_that_only_one_rank_refuses_do_not_count() -> None:
    for front in fronts():
        size = front.size()
        inputs = [front.rows()]
        if front.name == "torch":
            inputs.append(front.rows().requires_grad_())
        for odd in range(size):
            for rows in inputs:
                if front.rank() == odd:
                    with refused("splits", ValueError):
                        front.alltoall(rows, [-1] * size)
                    with refused("root", ValueError):
                        front.broadcast(rows, root_rank=size)
                    with refused("operation", ValueError):
                        front.reducescatter(rows, op=front.Max)
                    with refused("factor", TypeError):
                        front.allreduce(rows, prescale_factor="2")
                    with refused("root of an object", ValueError):
                        front.broadcast_object(odd, root_rank=size)
                assert front.broadcast_object(odd) == odd
                front.alltoall(rows)
                front.broadcast(rows, root_rank=0)
                front.reducescatter(rows)
                front.allreduce(rows)


def case_ranks_that_disagree() -> None:
    for front in fronts():
        size = front.size()
        if size == 1:
            continue
        for odd in range(size):
            others = [rank for rank in range(size) if rank != odd]
            for what, usual, other, most, one in DIFFERENT:
                # The root exists; among two ranks either may be called odd.
                with refused(
                    f"{front.name}: {what}", errors.MismatchError,
                    "'n'", what, f"rank {odd}: {one}", f"{ranks_text(others)}: {most}",
                ):  # fmt: skip
                    (other if front.rank() == odd else usual)(front)
                works(front)
                # The name can be used again.
                assert float(front.allreduce(front.ones(1), name="n")[0]) == 1


def ranks_text(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    together = ranks[-1] - ranks[0] == len(ranks) - 1
    dash = together and len(ranks) > 2
    if dash:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ",".join(map(str, ranks))


def case_after_a_mismatch_an_async_handle_is_used_up() -> None:
    for front in fronts():
        if front.size() > 1:
            for verb in [verb for verb in VERBS if "async" in verb]:
                handle = VERBS[verb](front, front.rows(1 + (front.rank() == 0)), name="n")
                with refused(f"{front.name} {verb}", errors.MismatchError, "'n'"):
                    front.synchronize(handle)
                with refused(f"{front.name} {verb}", ValueError, f"no handle {handle}"):
                    front.synchronize(handle)
        for handle in (0, -1, 10**9, None, "1"):
            with refused(f"{front.name} synchronize", ValueError, "no handle"):
                front.synchronize(handle)
            with refused(f"{front.name} poll", ValueError, "no handle"):
                front.poll(handle)
        works(front)


def case_after_shutdown() -> None:
    hororing.numpy.barrier()
    hororing.numpy.shutdown()
    case_before_init()


# ---------------------------------------------------------------------------------------------
# Tests

CASES = mpirun.case_names(globals())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_bad_input(case, size):
    mpirun.cases_of(__file__, size).check(case)
