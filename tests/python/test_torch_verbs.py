"""The verbs on torch tensors, on 1 to 4 ranks: types, views of all kinds, gradients, compression.

What is the same for every framework is in test_numpy_verbs.py.
"""

from __future__ import annotations

import functools
import gc
import random
import warnings
from collections.abc import Callable
from typing import Any

import mpirun
import numpy as np
import pytest
import torch

import hororing.torch as hvd
from hororing import errors
from hororing.torch.compression import Compressor

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
INTEGERS += [torch.uint16] if hasattr(torch, "uint16") else []
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
IN_PLACE: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: hvd.allreduce_(t, op=hvd.Sum),
    lambda t: hvd.synchronize(hvd.allreduce_async_(t, op=hvd.Sum)),
    lambda t: hvd.grouped_allreduce_([t], op=hvd.Sum)[0],
    lambda t: hvd.synchronize(hvd.grouped_allreduce_async_([t], op=hvd.Sum))[0],
    lambda t: hvd.broadcast_(t, 0),
    lambda t: hvd.synchronize(hvd.broadcast_async_(t, 0)),
]


def tensor_of(rank: int, dtype: torch.dtype, shape: tuple[int, ...], *key: int) -> torch.Tensor:
    """What `rank` passes: small multiples of 1/4, so that no sum is rounded."""
    rng = np.random.default_rng([mpirun.seed(), rank, *key])
    values = torch.from_numpy(np.asarray(rng.integers(-40, 41, shape)))
    if dtype == torch.bool:
        return values > 20
    if dtype in INTEGERS:
        return (values.abs() if dtype in (torch.uint8, torch.int8) else values).to(dtype)
    return (values / 4).to(dtype)


def tensors_of(dtype: torch.dtype, shape: tuple[int, ...], *key: int) -> list[torch.Tensor]:
    return [tensor_of(rank, dtype, shape, *key) for rank in range(hvd.size())]


def expected(tensors: list[torch.Tensor], op: int) -> torch.Tensor:
    dtype = tensors[0].dtype
    if dtype == torch.bool:
        either = op in (hvd.Sum, hvd.Max)
        return functools.reduce(torch.logical_or if either else torch.logical_and, tensors)
    wide = torch.float64 if dtype in FLOATS else torch.int64
    functions = {hvd.Min: torch.minimum, hvd.Max: torch.maximum, hvd.Product: torch.mul}
    # uint16 first: its bits, since int64 would sign-extend nothing but torch has few kernels.
    total = functools.reduce(functions.get(op, torch.add), [t.to(wide) for t in tensors])
    if op == hvd.Average:
        total = (
            total / len(tensors)
            if dtype in FLOATS
            else torch.div(total, len(tensors), rounding_mode="trunc")
        )
    return total.to(dtype)


def agree(result: Any, wanted: torch.Tensor) -> None:
    assert isinstance(result, torch.Tensor)
    assert result.dtype == wanted.dtype
    assert result.shape == wanted.shape, f"{result.shape} instead of {wanted.shape}"
    as_floats = [t.to(torch.float64) if t.dtype in FLOATS else t.to(torch.int64)
                 for t in (result, wanted)]  # fmt: skip
    if wanted.dtype in FLOATS:
        unit = torch.finfo(wanted.dtype).eps if wanted.dtype != torch.float64 else 1e-15
        torch.testing.assert_close(*as_floats, rtol=2 * unit, atol=0)
    else:
        assert torch.equal(*as_floats)


# ---------------------------------------------------------------------------------------------
# Cases, on every rank


def case_before_init() -> None:
    for call in (
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.allreduce(torch.ones(1, requires_grad=True)),
        lambda: hvd.allgather(torch.ones(1, requires_grad=True)),
        lambda: hvd.broadcast(torch.ones(1, requires_grad=True), 0),
        lambda: hvd.grouped_allreduce([torch.ones(1, requires_grad=True)]),
        lambda: hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "s", hvd.Sum),
        hvd.barrier,
    ):
        with pytest.raises(errors.NotInitializedError, match=r"use hvd\.init\(\)"):
            call()
    hvd.init()


def case_every_type_and_operation() -> None:
    rank, root = hvd.rank(), hvd.size() - 1
    for key, dtype in enumerate([*INTEGERS, *FLOATS, torch.bool]):
        for shape in ((), (0, 3), (7,), (5, 13)):
            tensors = tensors_of(dtype, shape, 1, key)
            for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
                if (dtype == torch.bool and op == hvd.Average) or (
                    op == hvd.Product and dtype in (torch.float16, torch.bfloat16, torch.float32)
                ):
                    continue
                wanted = expected(tensors, op)
                agree(hvd.allreduce(tensors[rank], op=op), wanted)
                mine = tensors[rank].clone()
                assert hvd.allreduce_(mine, op=op) is mine
                agree(mine, wanted)
            agree(hvd.broadcast(tensors[rank], root), tensors[root])
            mine = tensors[rank].clone()
            assert hvd.broadcast_(mine, root) is mine
            agree(mine, tensors[root])
            if shape:
                rows = [t[: r + 1] for r, t in enumerate(tensors)]
                agree(hvd.allgather(rows[rank]), torch.cat(rows))
        if dtype == torch.bool:
            with pytest.raises(ValueError, match="Average of bool is not defined"):
                hvd.allreduce(torch.ones(2, dtype=dtype))


def case_short_floats_are_rounded_once() -> None:
    for dtype, big in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        mine = torch.full((9,), big if hvd.rank() == 0 else 1.0, dtype=dtype)
        wanted = torch.full((9,), big + hvd.size() - 1).to(dtype)
        assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), wanted)


def case_async_in_any_order_on_every_rank() -> None:
    rank, size = hvd.rank(), hvd.size()
    plan, mine = random.Random(mpirun.seed()), random.Random(mpirun.seed() + 1 + rank)
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
    for turn in range(4):
        jobs: list[tuple[Callable[[], int], torch.Tensor]] = []
        for number in range(30):
            tensors = tensors_of(plan.choice(dtypes), (plan.choice([1, 400]), 3), 2, turn, number)
            name, kind = f"any.{number}", plan.randrange(3)
            if kind == 0:
                start = functools.partial(hvd.allreduce_async, tensors[rank], None, name, hvd.Sum)
                wanted = expected(tensors, hvd.Sum)
            elif kind == 1:
                root = plan.randrange(size)
                start = functools.partial(hvd.broadcast_async_, tensors[rank].clone(), root, name)
                wanted = tensors[root]
            else:
                start = functools.partial(hvd.allgather_async, tensors[rank], name)
                wanted = torch.cat(tensors)
            jobs.append((start, wanted))
        mine.shuffle(jobs)
        running = [(start(), wanted) for start, wanted in jobs]
        del jobs
        gc.collect()
        mine.shuffle(running)
        for handle, wanted in running:
            agree(hvd.synchronize(handle), wanted)
            with pytest.raises(ValueError, match="there is no handle"):
                hvd.poll(handle)


def case_groups_of_mixed_types() -> None:
    rank = hvd.rank()
    members = [(dtype, shape) for dtype in [*INTEGERS, *FLOATS] for shape in ((3,), (), (0, 2))]
    tensors = [tensors_of(dtype, shape, 3, k) for k, (dtype, shape) in enumerate(members)]
    results = hvd.grouped_allreduce(each[rank] for each in tensors)
    assert type(results) is list
    for result, each in zip(results, tensors, strict=True):
        agree(result, expected(each, hvd.Average))
    mine = [each[rank].clone() for each in tensors]
    written = hvd.grouped_allreduce_(mine, op=hvd.Max)
    assert type(written) is tuple
    for result, given, each in zip(written, mine, tensors, strict=True):
        assert result is given
        agree(result, expected(each, hvd.Max))
    gathered = hvd.grouped_allgather([each[rank].reshape(-1, 1) for each in tensors])
    assert type(gathered) is tuple
    for result, each in zip(gathered, tensors, strict=True):
        agree(result, torch.cat([t.reshape(-1, 1) for t in each]))
    rows = hvd.grouped_allreduce(torch.arange(6.0).reshape(3, 2))
    assert [row.tolist() for row in rows] == [[0, 1], [2, 3], [4, 5]]


def case_views_of_all_kinds() -> None:
    """Out of place through a copy, in place copied back; nothing between is written."""
    rank, size = hvd.rank(), hvd.size()
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t.t(),
        lambda t: t[::2, 1:],
        lambda t: t[:, 2],
        lambda t: t[3:5],  # contiguous, not at the beginning
        lambda t: t[1:1],
        lambda t: t.reshape(2, 4, 3, 2).to(memory_format=torch.channels_last),
        lambda t: t.unfold(1, 2, 2).permute(2, 0, 1),
        lambda t: t.diagonal(),
    ]
    for (key, view), dtype in ((v, d) for v in enumerate(views) for d in FLOATS):
        wholes = tensors_of(dtype, (8, 6), 4, key)
        wanted = expected([view(t).contiguous() for t in wholes], hvd.Sum)
        agree(hvd.allreduce(view(wholes[rank]), op=hvd.Sum), wanted)
        agree(hvd.allgather(view(wholes[rank])), torch.cat([view(t) for t in wholes]))
        agree(hvd.broadcast(view(wholes[rank]), size - 1), view(wholes[-1]))
        mine, untouched = wholes[rank].clone(), wholes[rank].clone()
        viewed, version = view(mine), mine._version
        assert hvd.allreduce_(viewed, op=hvd.Sum) is viewed
        agree(viewed, wanted)
        if viewed.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr():
            view(untouched).copy_(wanted)
            assert torch.equal(mine, untouched)
            assert mine._version > version


def case_tensors_with_a_pending_negation() -> None:
    rank, size = hvd.rank(), hvd.size()
    for count in (1, 4):  # a single element is contiguous as well
        numbers = torch.complex(torch.arange(count) + 2.0, torch.arange(count) + 1.0 + rank)
        negated = numbers.conj().imag
        assert negated.is_neg()
        assert negated.is_contiguous() == (count == 1)
        firsts = [-1.0 - i for i in range(count)]  # what rank 0 passes
        total = [size * value - sum(range(size)) for value in firsts]
        assert hvd.allreduce(negated, op=hvd.Sum).tolist() == total
        assert hvd.allgather(negated)[:count].tolist() == firsts
        assert hvd.broadcast(negated, 0).tolist() == firsts
        assert hvd.allreduce_(negated, op=hvd.Sum).tolist() == total
        assert numbers.imag.tolist() == [-value for value in total]
        assert numbers.real.tolist() == [i + 2 for i in range(count)]


def case_expanded_tensors() -> None:
    rank, size = hvd.rank(), hvd.size()
    wide = torch.tensor([1.0 + rank]).expand(3, 4)
    assert hvd.allreduce(wide, op=hvd.Max).tolist() == [[size] * 4] * 3
    assert hvd.broadcast(wide, 0).tolist() == [[1] * 4] * 3
    assert hvd.allgather(wide).shape == (3 * size, 4)
    for write in IN_PLACE:
        with pytest.raises(ValueError, match=r"expanded tensor share memory.*clone\(\)"):
            write(wide)
    one = torch.tensor([[3.0]]).expand(1, 1)  # nothing is shared
    assert hvd.allreduce_(one).tolist() == [[3]]


def case_writing_in_place_is_seen_by_autograd() -> None:
    for write in IN_PLACE:
        for mine in (torch.ones(6), torch.ones(3, 2).t()):
            version = mine._version
            assert write(mine) is mine
            assert mine._version > version
        weight = torch.ones(3, requires_grad=True)
        saved = weight * 2
        loss = (saved * saved).sum()
        write(saved.detach())  # shares memory and version with what autograd has saved
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    mine = torch.ones(6)
    version = mine._version
    hvd.allreduce(mine)
    hvd.broadcast(mine, 0)
    hvd.allgather(mine)
    hvd.synchronize(hvd.allreduce_async(mine))
    assert mine._version == version


def case_parameters_are_written_to() -> None:
    rank, size = hvd.rank(), hvd.size()
    for write in IN_PLACE:
        for shape in ((4, 3), ()):
            weight = torch.nn.Parameter(torch.full(shape, float(rank + 1)))
            assert write(weight) is weight
            assert weight.requires_grad
            assert weight.is_leaf
            assert weight.grad_fn is None
            assert weight.unique().item() in (1, sum(range(size + 1)))
    turned = torch.nn.Parameter(torch.full((4, 3), float(rank)).t())
    assert not turned.is_contiguous()
    hvd.broadcast_(turned, size - 1)
    assert (turned == size - 1).all()
    assert turned.is_leaf


def case_results_do_not_share_memory() -> None:
    mine = torch.ones(50)
    for result in (
        hvd.allreduce(mine),
        hvd.broadcast(mine, 0),
        hvd.allgather(mine),
        hvd.grouped_allreduce([mine])[0],
        hvd.synchronize(hvd.broadcast_async(mine, 0)),
    ):
        assert not result.requires_grad
        result.fill_(99)
    assert mine.tolist() == [1] * 50
    part = hvd.allgather(torch.full((1000,), 7))[3:6]
    gc.collect()
    hvd.allgather(torch.full((1000,), 8))
    assert part.tolist() == [7, 7, 7]


def case_what_is_not_supported_is_refused_by_name() -> None:
    for call in (
        hvd.allreduce,
        hvd.allreduce_,
        hvd.allreduce_async,
        hvd.allgather,
        lambda t: hvd.broadcast(t, 0),
        lambda t: hvd.grouped_allreduce([torch.ones(1), t]),
    ):
        for what in (1.0, np.ones(2), [torch.ones(2)], None):
            with pytest.raises(TypeError, match=f"takes torch tensors, not {type(what).__name__}"):
                call(what)
        for what, text in (
            (torch.eye(2).to_sparse(), "sparse_allreduce_async"),
            (torch.eye(2).to_sparse_csr(), r"use tensor\.to_dense\(\)"),
            (torch.ones(2, device="meta"), "META tensors"),
        ):
            with pytest.raises(ValueError, match=text):
                call(what)
    with pytest.raises(ValueError, match="without dimensions cannot be gathered"):
        hvd.allgather(torch.tensor(1.0))
    with pytest.raises(ValueError, match="supersedes average"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="no reduce operation 99"):
        hvd.allreduce(torch.ones(1, requires_grad=True), op=99)
    if hvd.size() == 3:
        with pytest.raises(NotImplementedError, match="a power of two, not 3"):
            hvd.allreduce(torch.ones(1), op=hvd.Adasum)
    else:
        assert hvd.allreduce(torch.ones(1), op=hvd.Adasum).tolist() == [1]
    with pytest.raises(ValueError, match="is not a rank of this job"):
        hvd.broadcast(torch.ones(1, requires_grad=True), hvd.size())


def case_the_deprecation_of_average_blames_the_caller() -> None:
    size = hvd.size()
    calls: list[Callable[[bool], torch.Tensor]] = [
        lambda a: hvd.allreduce(torch.ones(2), average=a),
        lambda a: hvd.allreduce(torch.ones(2, requires_grad=True), average=a),
        lambda a: hvd.allreduce_(torch.ones(2), average=a),
        lambda a: hvd.synchronize(hvd.allreduce_async(torch.ones(2), average=a)),
        lambda a: hvd.grouped_allreduce([torch.ones(2)], average=a)[0],
        lambda a: hvd.grouped_allreduce([torch.ones(2, requires_grad=True)], average=a)[0],
        lambda a: hvd.grouped_allreduce_([torch.ones(2)], average=a)[0],
    ]
    for call in calls:
        for average, wanted in ((True, 1), (False, size)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert call(average).tolist() == [wanted] * 2
            (warning,) = caught
            assert warning.category is DeprecationWarning
            assert warning.filename == __file__


# -- gradients; what comes from above is rank + 1 everywhere, unless said otherwise


def gradient(result: torch.Tensor, leaf: torch.Tensor, above: float | None = None) -> list[float]:
    leaf.grad = None
    result.backward(torch.full_like(result, hvd.rank() + 1 if above is None else above))
    assert leaf.grad is not None
    assert leaf.grad.shape == leaf.shape
    return sorted(set(leaf.grad.flatten().tolist()))


def case_gradients_of_allreduce() -> None:
    size = hvd.size()
    ranks = range(1, size + 1)
    leaf = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    for op, wanted in (
        (hvd.Average, sum(ranks) / size),
        (hvd.Sum, sum(ranks)),
        (hvd.Max, size),
        (hvd.Min, 1),
        (hvd.Product, int(np.prod(list(ranks)))),
    ):
        assert gradient(hvd.allreduce(leaf, op=op), leaf) == [wanted]
        (both,) = hvd.grouped_allreduce([leaf], op=op)
        assert gradient(both, leaf) == [wanted]
    scaled = hvd.allreduce(leaf, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    assert scaled.unique().tolist() == [1.5 * size]
    assert gradient(scaled, leaf) == [1.5 * sum(ranks)]
    turned = hvd.allreduce(leaf.t(), op=hvd.Sum)  # not contiguous; nor is what comes from above
    assert gradient(turned.t()[::2], leaf) == [0, sum(ranks)]
    leaf.grad = None
    (hvd.allreduce(leaf, op=hvd.Sum) * (hvd.rank() + 1)).sum().backward()
    assert leaf.grad.unique().tolist() == [sum(ranks)]


def case_gradients_of_groups() -> None:
    size = hvd.size()
    ranks = range(1, size + 1)
    leaves = [torch.ones(2, requires_grad=True), torch.ones(3, dtype=torch.bfloat16)]
    leaves += [torch.ones(4, requires_grad=True), torch.arange(5), torch.ones(1)]
    leaves[1].requires_grad_()
    results = hvd.grouped_allreduce(leaves, op=hvd.Sum)
    assert [r.requires_grad for r in results] == [True, True, True, False, True]
    assert results[3].tolist() == [size * i for i in range(5)]
    # Of the second nothing is used: its gradient is zero. The last one wants none.
    (results[0].sum() * (hvd.rank() + 1) + results[2].sum() * 2).backward()
    assert leaves[0].grad.tolist() == [sum(ranks)] * 2
    assert leaves[1].grad is None or leaves[1].grad.tolist() == [0] * 3
    assert leaves[2].grad.tolist() == [2 * size] * 4
    assert leaves[4].grad is None
    gathered = hvd.grouped_allgather([leaves[0], leaves[3], leaves[2]])
    assert [g.requires_grad for g in gathered] == [True, False, True]
    leaves[0].grad = leaves[2].grad = None
    (gathered[0].sum() * (hvd.rank() + 1) + gathered[2].sum()).backward()
    assert leaves[0].grad.tolist() == [sum(ranks) / size] * 2
    assert leaves[2].grad.tolist() == [1] * 4


def case_gradients_of_allgather() -> None:
    rank, size = hvd.rank(), hvd.size()
    leaf = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    assert gradient(hvd.allgather(leaf), leaf) == [(size + 1) / 2]
    # Each row of the result has its own weight, and each rank its own number of rows.
    for rows in ([r + 2 for r in range(size)], [2 * r for r in range(size)]):
        leaf = torch.ones(rows[rank], 3, dtype=torch.float64, requires_grad=True)
        result = hvd.allgather(leaf)
        weights = torch.arange(len(result), dtype=torch.float64)[:, None]
        (result * weights * (rank + 1)).sum().backward()
        first = sum(rows[:rank])
        wanted = weights[first : first + rows[rank]].expand(-1, 3) * (size + 1) / 2
        torch.testing.assert_close(leaf.grad, wanted, rtol=1e-14, atol=0)


def case_gradients_of_broadcast() -> None:
    size = hvd.size()
    for root in range(size):
        leaf = torch.ones(4, dtype=torch.float64, requires_grad=True)
        wanted = (size + 1) / 2 if hvd.rank() == root else 0
        assert gradient(hvd.broadcast(leaf, root), leaf) == [wanted]


def case_gradients_of_gradients() -> None:
    size = hvd.size()
    leaf = torch.ones(3, requires_grad=True)
    total = hvd.allreduce(leaf, op=hvd.Sum)
    (first,) = torch.autograd.grad((total**2).sum(), leaf, create_graph=True)
    assert first.tolist() == [2 * size * size] * 3  # Sum(2 total) over ranks, total = size
    first.sum().backward()
    assert leaf.grad.tolist() == [2 * size * size] * 3


def case_backward_passes_in_any_order_on_every_rank() -> None:
    rank, size = hvd.rank(), hvd.size()
    leaves = [torch.ones(i + 1, requires_grad=True) for i in range(6)]
    results = [hvd.allreduce(leaf, op=hvd.Sum) for leaf in leaves]
    order = random.Random(mpirun.seed() + rank).sample(range(6), 6)
    failures: list[Any] = []

    # Each in a thread of its own: a blocking backward pass must not depend on the order.
    import threading

    def play(index: int) -> None:
        try:
            (results[index].sum() * (index + 1)).backward()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=play, args=(index,)) for index in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert [leaf.grad.unique().tolist() for leaf in leaves] == [
        [size * (index + 1)] for index in range(6)
    ]


def case_what_is_not_recorded() -> None:
    leaf = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert not hvd.allreduce(leaf).requires_grad
    for result in (
        hvd.synchronize(hvd.allreduce_async(leaf)),
        hvd.synchronize(hvd.broadcast_async(leaf, 0)),
        hvd.synchronize(hvd.allgather_async(leaf)),
        hvd.allreduce(torch.ones(3)),
    ):
        assert not result.requires_grad
    # A rank that wants no gradient and ranks that do still make the same requests.
    mixed = torch.ones(3, requires_grad=hvd.rank() == 0)
    assert hvd.allreduce(mixed, op=hvd.Sum).tolist() == [hvd.size()] * 3
    assert hvd.allgather(mixed).tolist() == [1] * 3 * hvd.size()
    assert hvd.broadcast(mixed, 0).tolist() == [1] * 3


def case_a_mismatch_in_the_forward_pass_is_one_error() -> None:
    if hvd.size() == 1:
        return
    leaf = torch.ones(2 + hvd.rank() // (hvd.size() - 1), requires_grad=True)
    with pytest.raises(errors.MismatchError, match=r"'differ'.*shapes"):
        hvd.allreduce(leaf, name="differ")
    assert hvd.allreduce(leaf[:1], name="differ").tolist() == [1]


# -- compression


class _Hundredth(Compressor):
    """Sends a hundredth, as float64, and remembers the type."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.double() / 100, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        assert tensor.dtype == torch.float64
        return (tensor * 100).to(ctx)


def case_compression() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = torch.tensor([1.0009765625 + rank, 70000.0, 1e-9], dtype=torch.float64)  # 1 + 2^-10
    for compression, wire in (
        (hvd.Compression.none, torch.float64),
        (hvd.Compression.fp16, torch.float16),
        (hvd.Compression.bf16, torch.bfloat16),
    ):
        sent = [
            torch.tensor([1.0009765625 + r, 70000.0, 1e-9], dtype=torch.float64).to(wire)
            for r in range(size)
        ]
        wanted = expected(sent, hvd.Average).double()
        result = hvd.allreduce(mine, compression=compression)
        assert result.dtype == torch.float64
        unit = 1e-15 if wire is torch.float64 else torch.finfo(wire).eps
        torch.testing.assert_close(result, wanted, rtol=unit, atol=0)
        whole = torch.arange(100_000, 100_003)
        assert torch.equal(hvd.allreduce(whole, compression=compression), whole)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.bool):
            given = torch.ones(2, dtype=dtype)
            back = hvd.grouped_allreduce([given, whole], compression=compression, op=hvd.Max)
            assert back[0].dtype == dtype
            assert torch.equal(back[0], given)
            assert torch.equal(back[1], whole)
        leaf = torch.ones(3, requires_grad=True)
        assert gradient(hvd.allreduce(leaf, compression=compression), leaf) == [(size + 1) / 2]
        (grouped,) = hvd.grouped_allreduce([leaf], compression=compression, op=hvd.Sum)
        assert gradient(grouped, leaf) == [size * (size + 1) / 2]
    assert hvd.allreduce(mine, compression=hvd.Compression.fp16)[1] == float("inf")
    assert mine.dtype == torch.float64
    assert mine[1] == 70000


def case_a_compressor_of_ones_own() -> None:
    mine = torch.full((3,), 5 + hvd.rank())
    assert hvd.allreduce(mine, compression=_Hundredth, op=hvd.Max).tolist() == [4 + hvd.size()] * 3
    leaf = torch.ones(2, requires_grad=True)
    result = hvd.allreduce(leaf, compression=_Hundredth)
    assert gradient(result, leaf, above=1.0) == [1]
    with pytest.raises(NotImplementedError, match="Compressor needs compress"):
        hvd.allreduce(mine, compression=Compressor)


# -- sparse tensors


def _sparse(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """5 x 4: `rank` values, the first index twice (so not coalesced)."""
    columns = [i % 4 for i in range(rank)]
    rows = [(i + rank) % 5 for i in range(rank)]
    indices = torch.tensor([rows + rows[:1], columns + columns[:1]], dtype=torch.int64)
    values = torch.arange(1, indices.shape[1] + 1).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (5, 4))


def case_sparse_tensors() -> None:
    size, rank = hvd.size(), hvd.rank()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        dense = sum(_sparse(r, dtype).to_dense().double() for r in range(size))
        for op, wanted in ((hvd.Sum, dense), (hvd.Average, dense / size)):
            finish = hvd.sparse_allreduce_async(_sparse(rank, dtype), f"sparse.{op}", op)
            assert callable(finish)
            result = finish()
            assert result.layout is torch.sparse_coo
            assert result.dtype == dtype
            unit = 1e-15 if dtype is torch.float64 else 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(result.to_dense().double(), wanted, rtol=unit, atol=unit)
            with pytest.raises(ValueError, match="there is no handle"):
                finish()
    # Values that are vectors; several at once, in another order on every rank.
    hybrid = torch.sparse_coo_tensor(torch.tensor([[1, 4]]), torch.full((2, 3), 1.0 + rank), (6, 3))
    starts = {
        name: lambda name=name: hvd.sparse_allreduce_async(hybrid, name, hvd.Sum)
        for name in ("a", "b", "c")
    }
    order = random.Random(mpirun.seed() + rank).sample(sorted(starts), 3)
    finishes = {name: starts[name]() for name in order}
    for finish in finishes.values():
        total = finish().to_dense()
        assert total.sum().item() == 6 * sum(range(1, size + 1))
        assert total[1].tolist() == [sum(range(1, size + 1))] * 3
    empty = torch.sparse_coo_tensor(torch.empty(2, 0), torch.empty(0), (5, 4))
    assert hvd.sparse_allreduce_async(empty, None, hvd.Sum)().to_dense().abs().sum() == 0


def case_sparse_arguments() -> None:
    with pytest.raises(TypeError, match="takes sparse COO tensors"):
        hvd.sparse_allreduce_async(torch.ones(2), "dense", hvd.Sum)
    with pytest.raises(TypeError, match="takes sparse COO tensors"):
        hvd.sparse_allreduce_async([1.0], "list", hvd.Sum)  # type: ignore[arg-type]
    for op in (hvd.Min, hvd.Max, hvd.Product):
        with pytest.raises(ValueError, match="not defined for sparse tensors"):
            hvd.sparse_allreduce_async(_sparse(1), "op", op)
    if hvd.size() == 1:
        return
    rows = 5 + (hvd.rank() == 1)
    tall = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (rows,))
    finish = hvd.sparse_allreduce_async(tall, "tall", hvd.Sum)
    with pytest.raises(ValueError, match="'tall': shapes differ") as caught:
        finish()
    assert "[6]" in str(caught.value)
    assert hvd.allreduce(torch.ones(1)).tolist() == [1]


def case_shutdown() -> None:
    hvd.shutdown()
    with pytest.raises(errors.NotInitializedError):
        hvd.allreduce(torch.ones(1, requires_grad=True))


@pytest.mark.parametrize("case", mpirun.case_names(globals()))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_case(case: str, size: int):
    mpirun.cases_of(__file__, size).check(case)
