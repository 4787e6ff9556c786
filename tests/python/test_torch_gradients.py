"""Gradients of the verbs on 1 to 4 ranks: alltoall, reducescatter, process sets, complex numbers.

Horovod's values (API.md, for an upstream gradient of rank + 1) where they are not mathematical,
finite differences where they are. Those of the whole world's allreduce, allgather and broadcast
are in test_torch_verbs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpirun
import numpy as np
import pytest
import torch

import hororing.torch as hvd


def leaf_of(rank: int, shape: tuple[int, ...], *key: int, dtype: Any = torch.float64) -> Any:
    rng = np.random.default_rng([mpirun.seed(), rank, *key])
    values = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.is_complex
                                           else 0)  # fmt: skip
    return torch.from_numpy(np.asarray(values)).to(dtype).requires_grad_()


def above(result: torch.Tensor) -> torch.Tensor:
    return torch.full_like(result, hvd.rank() + 1)


def case_init() -> None:
    hvd.init(process_sets="dynamic")


def case_values_of_the_table() -> None:
    size = hvd.size()
    wanted = [1.0 + r for r in range(size) for _ in range(2)]
    leaf = torch.ones(2 * size, 3, requires_grad=True)
    result = hvd.alltoall(leaf)
    result.backward(above(result))
    assert leaf.grad[:, 1].tolist() == wanted
    for op, factor in ((hvd.Average, 1), (hvd.Sum, size)):
        for verb in (hvd.reducescatter, lambda t, op: hvd.grouped_reducescatter([t], op=op)[0]):
            leaf.grad = None
            result = verb(leaf, op=op)
            assert result.tolist() == [[size if op == hvd.Sum else 1] * 3] * 2
            result.backward(above(result))
            assert leaf.grad[:, 1].tolist() == [factor * w for w in wanted]
    leaf.grad = None
    scaled = hvd.reducescatter(leaf, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    assert scaled.unique().tolist() == [1.5 * size]
    scaled.backward(above(scaled))
    assert leaf.grad[:, 0].tolist() == [1.5 * size * w for w in wanted]


def case_uneven_rows() -> None:
    rank, size = hvd.rank(), hvd.size()
    for rows in range(2 * size + 2):
        leaf = torch.ones(rows, 2, dtype=torch.float64, requires_grad=True)
        result = hvd.reducescatter(leaf)
        parts = [rows // size + (r < rows % size) for r in range(size)]
        assert len(result) == parts[rank]
        result.backward(above(result))
        assert leaf.grad[:, 0].tolist() == [r + 1 for r in range(size) for _ in range(parts[r])]
    # Groups: two shapes, an integer tensor, a leaf that wants no gradient.
    tall, flat = torch.ones(size + 1, 2, requires_grad=True), torch.ones(1, requires_grad=True)
    whole = torch.arange(size)
    results = hvd.grouped_reducescatter([tall, whole, flat, torch.ones(size)], op=hvd.Sum)
    assert [r.requires_grad for r in results] == [True, False, True, True]
    assert results[1].tolist() == [size * rank]
    sum(r.sum() * (rank + 1) for r in results).backward()
    assert tall.grad[:, 0].tolist() == [size, size, *(size * (r + 1) for r in range(1, size))]
    assert flat.grad.tolist() == [size]


def case_alltoall_sends_gradients_back() -> None:
    """Row i from rank s to rank d has the weight of its place at d, whatever the splits."""
    rank, size = hvd.rank(), hvd.size()
    plan = np.random.default_rng([mpirun.seed(), 5])
    for _ in range(6):
        splits = plan.integers(0, 4, (size, size))
        surplus = plan.integers(0, 3, size)
        rows = int(splits[rank].sum() + surplus[rank])
        leaf = torch.ones(rows, 2, dtype=torch.float64, requires_grad=True)
        received, counts = hvd.alltoall(leaf, splits=splits[rank].tolist())
        assert counts.tolist() == splits[:, rank].tolist()
        assert counts.dtype == torch.int32
        weights = torch.arange(1.0, len(received) + 1, dtype=torch.float64)[:, None] + 100 * rank
        (received * weights).sum().backward()
        wanted = [
            1.0 + splits[:rank, d].sum() + i + 100 * d
            for d in range(size)
            for i in range(splits[rank, d])
        ]
        assert leaf.grad[:, 0].tolist() == wanted + [0.0] * int(surplus[rank])
        assert leaf.grad.shape == leaf.shape


def difference(call: Callable[[Any], Any], leaf: Any, *key: int) -> None:
    """Compare the gradient of sum over ranks of <result, w> with the finite difference.

    The loss of the whole job is what an exact gradient belongs to; it is quadratic in the step.
    """
    rank = hvd.rank()
    result = call(leaf)
    weights = leaf_of(rank, tuple(result.shape), 7, *key, dtype=leaf.dtype).detach()
    (gradient,) = torch.autograd.grad((result * weights.conj()).real.sum(), leaf)
    direction = leaf_of(rank, tuple(leaf.shape), 8, *key, dtype=leaf.dtype).detach()

    def loss(step: float) -> torch.Tensor:
        with torch.no_grad():
            mine = (call(leaf + step * direction) * weights.conj()).real.sum()
            return hvd.allreduce(mine, op=hvd.Sum)

    numeric = (loss(1e-3) - loss(-1e-3)) / 2e-3
    # 1e-16 of rounding on values near 100, over 2e-3
    exact = hvd.allreduce((gradient.conj() * direction).real.sum(), op=hvd.Sum)
    torch.testing.assert_close(exact, numeric, rtol=1e-9, atol=1e-9)


def case_finite_differences() -> None:
    rank, size = hvd.rank(), hvd.size()
    calls: list[Callable[[Any], Any]] = [
        lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=0.5),
        lambda t: hvd.allreduce(t),
        lambda t: hvd.grouped_allreduce([t, t * t], op=hvd.Sum)[1],
        lambda t: hvd.alltoall(t, [2] * size)[0],
        lambda t: hvd.alltoall((t * t).mT.contiguous().mT[:-1]),
    ]
    if size == 1:  # elsewhere Horovod's gradients of these are multiples of the mathematical ones
        calls += [
            lambda t: hvd.allgather(t),
            lambda t: hvd.broadcast(t, 0),
            lambda t: hvd.reducescatter(t, op=hvd.Sum, postscale_factor=2.0),
        ]
    for key, dtype in enumerate((torch.float64, torch.complex128)):
        leaf = leaf_of(rank, (2 * size + 1, 3), 1, key, dtype=dtype)
        for number, call in enumerate(calls):
            difference(call, leaf, key, number)


def case_process_sets() -> None:
    rank, size = hvd.rank(), hvd.size()
    if size < 2:
        return
    odd = hvd.add_process_set(range(1, size))
    if odd.included():
        members, place = size - 1, rank - 1
        above_all = [r + 1 for r in range(1, size)]
        mean = sum(above_all) / members
        leaf = torch.ones(2 * members, 3, dtype=torch.float64, requires_grad=True)

        def gradient(result: torch.Tensor) -> list[float]:
            leaf.grad = None
            result.backward(above(result))
            return leaf.grad[:, 0].tolist()

        each_twice = [a for a in above_all for _ in range(2)]
        assert gradient(hvd.allreduce(leaf, process_set=odd)) == [mean] * 2 * members
        total = hvd.allreduce(leaf, op=hvd.Sum, process_set=odd)
        assert gradient(total) == [sum(above_all)] * 2 * members
        assert gradient(hvd.allgather(leaf, process_set=odd)) == [mean] * 2 * members
        for root in range(1, size):
            wanted = mean if rank == root else 0
            sent = hvd.broadcast(leaf, root, process_set=odd)
            assert gradient(sent) == [wanted] * 2 * members
        assert gradient(hvd.alltoall(leaf, process_set=odd)) == each_twice
        assert gradient(hvd.reducescatter(leaf, process_set=odd)) == each_twice
        scattered = hvd.reducescatter(leaf, op=hvd.Sum, process_set=odd)
        assert gradient(scattered) == [members * a for a in each_twice]
        rows = hvd.allgather(leaf[: rank + 1] * 1.0, process_set=odd)  # ragged
        weights = torch.arange(len(rows), dtype=torch.float64)[:, None]
        leaf.grad = None
        (rows * weights).sum().backward()
        first = sum(min(r + 1, 2 * members) for r in range(1, rank))
        count = min(rank + 1, 2 * members)
        assert leaf.grad[:count, 0].tolist() == list(range(first, first + count))
        sparse = torch.sparse_coo_tensor(torch.tensor([[place]]), torch.ones(1), (members,))
        finish = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Average, odd)
        torch.testing.assert_close(finish().to_dense(), torch.full((members,), 1 / members))
        assert hvd.broadcast_object(rank, size - 1, process_set=odd) == size - 1
        assert hvd.allgather_object({rank}, process_set=odd) == [{r} for r in range(1, size)]
    else:
        for call in (
            lambda: hvd.alltoall(torch.ones(2, requires_grad=True), process_set=odd),
            lambda: hvd.reducescatter(torch.ones(2, requires_grad=True), process_set=odd),
            lambda: hvd.allreduce(torch.ones(2, requires_grad=True), process_set=odd),
            lambda: hvd.allgather_object(1, process_set=odd),
            lambda: hvd.broadcast_object(1, 1, process_set=odd),
            lambda: hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "s", hvd.Sum, odd),
        ):
            with pytest.raises(ValueError, match="rank 0 is not a member"):
                call()
    hvd.barrier()
    known = hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
    assert known == {0: list(range(size)), odd.process_set_id: list(range(1, size))}
    assert hvd.remove_process_set(odd)
    with pytest.raises(TypeError, match="not registered"):
        hvd.alltoall(torch.ones(2, requires_grad=True), process_set=odd)


def case_gradients_of_gradients() -> None:
    size = hvd.size()
    leaf = leaf_of(hvd.rank(), (2 * size, 2), 3)
    splits = [2] * size
    back = hvd.alltoall(hvd.alltoall(leaf, splits)[0], splits)[0]
    assert torch.equal(back, leaf)
    (first,) = torch.autograd.grad((back**3).sum(), leaf, create_graph=True)
    torch.testing.assert_close(first, 3 * leaf**2)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    torch.testing.assert_close(second, 6 * leaf)
    # reducescatter Average, and its backward, allgather, whose backward is an average
    part = hvd.reducescatter(leaf)
    (first,) = torch.autograd.grad((part**2).sum(), leaf, create_graph=True)
    torch.testing.assert_close(first, hvd.allgather(2 * part.detach()))
    first.sum().backward()
    assert leaf.grad.unique().tolist() == [2.0]


def case_complex_tensors_travel_as_pairs() -> None:
    rank, size = hvd.rank(), hvd.size()
    for key, dtype in enumerate((torch.complex64, torch.complex128)):
        all_of_them = [leaf_of(r, (2 * size, 3), 4, key, dtype=dtype).detach() for r in range(size)]
        mine, total = all_of_them[rank], sum(all_of_them)
        close = torch.testing.assert_close
        close(hvd.allreduce(mine, op=hvd.Sum), total)
        close(hvd.allreduce(mine.conj()), total.conj() / size)
        close(hvd.allreduce(mine[0, 0], op=hvd.Sum), total[0, 0])
        close(hvd.allreduce(mine.imag, op=hvd.Sum), total.imag)
        given = mine.clone().conj()
        assert given.is_conj()
        assert hvd.allreduce_(given, op=hvd.Sum) is given
        close(given, total.conj().resolve_conj())
        close(hvd.grouped_allreduce([mine, mine.real], op=hvd.Sum)[0], total)
        rows = [t[: r + 1] for r, t in enumerate(all_of_them)]
        close(hvd.allgather(rows[rank]), torch.cat(rows))
        close(hvd.broadcast(mine.mT, size - 1), all_of_them[-1].mT)
        close(hvd.alltoall(mine), torch.cat([t[2 * rank : 2 * rank + 2] for t in all_of_them]))
        close(hvd.reducescatter(mine, op=hvd.Sum), total[2 * rank : 2 * rank + 2])
        for op in (hvd.Min, hvd.Max, hvd.Product):
            with pytest.raises(ValueError, match="is not defined for torch"):
                hvd.allreduce(mine, op=op)
            with pytest.raises(ValueError, match="is not defined for torch"):
                hvd.grouped_allreduce_async_([mine.real.clone(), mine], op=op)
        for call in (hvd.allgather, hvd.alltoall, hvd.reducescatter, hvd.alltoall_async):
            with pytest.raises(ValueError, match="without dimensions"):
                call(mine[0, 0])
        with pytest.raises(TypeError, match="must be a number, not complex"):
            hvd.allreduce(mine, prescale_factor=1j)  # type: ignore[arg-type]


def case_splits_of_all_kinds() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = torch.arange(2 * size) + 100 * rank
    wanted = [2 * rank + i + 100 * r for r in range(size) for i in range(2)]
    even = [2] * size
    assert hvd.alltoall(mine).tolist() == wanted
    for splits in (even, tuple(even), torch.tensor(even, dtype=torch.int32)):
        received, counts = hvd.alltoall(mine, splits)
        assert received.tolist() == wanted
        assert counts.tolist() == even
    received, counts = hvd.synchronize(hvd.alltoall_async(mine))
    assert received.tolist() == wanted
    assert counts.tolist() == even
    # One rank with splits, the others without; rows to spare.
    longer = torch.cat([mine, torch.tensor([-1])])
    result = hvd.alltoall(longer, even) if rank == 0 else hvd.alltoall(mine)
    assert (result[0] if rank == 0 else result).tolist() == wanted
    for leaf in (torch.ones(2 * size), torch.ones(2 * size, requires_grad=True)):
        for splits, text in (
            (torch.tensor(even), "must be int32, not int64"),
            (torch.ones(size), "must be int32, not float32"),
            (torch.ones(size, 1, dtype=torch.int32), "must have one dimension"),
            ([1.5] * size, "must be a list of integers"),
            ([-1] * size, "-1"),
            ([3] * size, "splits"),
            ([1] * (size + 1), "splits"),
        ):
            with pytest.raises(ValueError, match=text):
                hvd.alltoall(leaf, splits)
    with pytest.raises(ValueError, match="dimension"):
        hvd.alltoall(torch.tensor(1.0))
    if size > 1:
        with pytest.raises(ValueError, match="split"):
            hvd.alltoall(torch.ones(size + 1))
    with pytest.raises(ValueError, match="no rows to scatter"):
        hvd.reducescatter(torch.tensor(1.0, requires_grad=True))
    for op in (hvd.Min, hvd.Adasum):
        with pytest.raises(hvd.UnsupportedOpError, match="use Average or Sum"):
            hvd.reducescatter(torch.ones(2, requires_grad=True), op=op)


def case_every_type_is_exchanged() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    ):  # fmt: skip
        mine = (torch.arange(size)[:, None] + rank).to(dtype)
        wanted = (torch.arange(size)[:, None] + rank).to(dtype)  # symmetric
        assert torch.equal(hvd.alltoall(mine), wanted)
        if dtype is not torch.bool:
            summed = (torch.arange(size)[:, None] * size + sum(range(size))).to(dtype)
            scattered = hvd.reducescatter(mine, op=hvd.Sum)
            assert torch.equal(scattered, summed[rank : rank + 1])
        if dtype.is_floating_point:
            halved = hvd.reducescatter(mine, compression=hvd.Compression.bf16)
            assert halved.dtype == dtype


def case_inference_mode() -> None:
    with torch.inference_mode():
        mine = torch.ones(2, 3)
        assert hvd.allreduce_(mine, op=hvd.Sum).unique().tolist() == [hvd.size()]
        turned = torch.ones(3, 2).t()
        hvd.broadcast_(turned, 0)
        handle = hvd.allreduce_async_(turned, op=hvd.Sum)
    assert hvd.synchronize(handle) is turned
    assert turned.unique().tolist() == [hvd.size()]
    assert hvd.allreduce(mine, op=hvd.Sum).unique().tolist() == [hvd.size() ** 2]
    with pytest.raises(ValueError, match=r"use tensor\.clone\(\)"):
        hvd.allreduce_(mine)


def case_unsupported_types_are_refused_with_a_remedy() -> None:
    short = torch.ones(2).to(torch.float8_e4m3fn)
    for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, lambda t: hvd.broadcast(t, 0)):
        with pytest.raises(ValueError, match=r"float8_e4m3fn .*Compression\.bf16"):
            call(short)
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        result = hvd.allreduce(short, compression=compression)
        assert result.dtype == short.dtype
        assert result.float().tolist() == [1, 1]
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(ValueError, match="nested tensors are not supported"):
        hvd.allreduce(nested)


def case_shutdown() -> None:
    hvd.shutdown()


@pytest.mark.parametrize("case", mpirun.case_names(globals()))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_case(case: str, size: int):
    mpirun.cases_of(__file__, size).check(case)
