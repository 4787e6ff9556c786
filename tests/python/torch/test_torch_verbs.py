"""Features of hororing.torch only: views of all kinds, writes that autograd notices, sparse and
complex tensors.

conformance/ tests results, errors and gradients of the verbs for every framework.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import mpirun
import numpy as np
import pytest
import session
import torch
from asked import asked_during
from torch.autograd import forward_ad

import hororing.numpy
import hororing.torch as hvd
from hororing import errors
from hororing._requests import handles, names
from hororing.torch import ops
from hororing.torch.compression import Compressor

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
IN_PLACE: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: hvd.allreduce_(t, op=hvd.Sum),
    lambda t: hvd.synchronize(hvd.allreduce_async_(t, op=hvd.Sum)),
    lambda t: hvd.grouped_allreduce_([t], op=hvd.Sum)[0],
    lambda t: hvd.synchronize(hvd.grouped_allreduce_async_([t], op=hvd.Sum))[0],
    lambda t: hvd.broadcast_(t, 0),
    lambda t: hvd.synchronize(hvd.broadcast_async_(t, 0)),
]


def leaf_of(rank: int, shape: tuple[int, ...], *key: int, dtype: Any = torch.float64) -> Any:
    rng = np.random.default_rng([mpirun.seed(), rank, *key])
    values = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.is_complex
                                           else 0)  # fmt: skip
    return torch.from_numpy(np.asarray(values)).to(dtype).requires_grad_()


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


def case_views_of_all_kinds() -> None:
    """Out of place through a copy, in place copied back; memory between elements is unchanged."""
    rank, size = hvd.rank(), hvd.size()
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t.t(),
        lambda t: t[::2, 1:],
        lambda t: t[:, 2],
        lambda t: t[3:5],  # contiguous, with an offset
        lambda t: t[1:1],
        lambda t: t.reshape(2, 4, 3, 2).to(memory_format=torch.channels_last),
        lambda t: t.unfold(1, 2, 2).permute(2, 0, 1),
        lambda t: t.diagonal(),
    ]
    for (key, view), dtype in ((v, d) for v in enumerate(views) for d in FLOATS):
        wholes = [leaf_of(r, (8, 6), 4, key).detach().mul(4).round().to(dtype) for r in range(size)]
        wanted = sum(view(t) for t in wholes)  # of small integers
        assert torch.equal(hvd.allreduce(view(wholes[rank]), op=hvd.Sum), wanted)
        gathered = torch.cat([view(t) for t in wholes])
        assert torch.equal(hvd.allgather(view(wholes[rank])), gathered)
        assert torch.equal(hvd.broadcast(view(wholes[rank]), size - 1), view(wholes[-1]))
        mine, untouched = wholes[rank].clone(), wholes[rank].clone()
        viewed, version = view(mine), mine._version
        assert hvd.allreduce_(viewed, op=hvd.Sum) is viewed
        assert torch.equal(viewed, wanted)
        if viewed.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr():
            view(untouched).copy_(wanted)
            assert torch.equal(mine, untouched)
            assert mine._version > version


def case_tensors_with_a_pending_negation() -> None:
    rank, size = hvd.rank(), hvd.size()
    for count in (1, 4):  # a single element is contiguous, too
        numbers = torch.complex(torch.arange(count) + 2.0, torch.arange(count) + 1.0 + rank)
        negated = numbers.conj().imag
        assert negated.is_neg()
        assert negated.is_contiguous() == (count == 1)
        firsts = [-1.0 - i for i in range(count)]  # rank 0's values
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
        write(saved.detach())  # shares memory and version with autograd's saved tensor
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


# -- gradients; the incoming gradient is rank + 1, unless a case says otherwise


def gradient(result: torch.Tensor, leaf: torch.Tensor, above: float | None = None) -> list[float]:
    leaf.grad = None
    result.backward(torch.full_like(result, hvd.rank() + 1 if above is None else above))
    assert leaf.grad is not None
    assert leaf.grad.shape == leaf.shape
    return sorted(set(leaf.grad.flatten().tolist()))


def case_backward_passes_in_any_order_on_every_rank() -> None:
    rank, size = hvd.rank(), hvd.size()
    leaves = [torch.ones(i + 1, requires_grad=True) for i in range(6)]
    results = [hvd.allreduce(leaf, op=hvd.Sum) for leaf in leaves]
    order = random.Random(mpirun.seed() + rank).sample(range(6), 6)
    failures: list[Any] = []

    # Each runs in its own thread: blocking backward passes must not depend on the order.
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


def case_gradients_that_are_not_contiguous() -> None:
    size = hvd.size()
    leaf = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    turned = hvd.allreduce(leaf.t(), op=hvd.Sum)
    assert gradient(turned.t()[::2], leaf) == [0, size * (size + 1) / 2]


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
    # A rank without a gradient makes the same requests as ranks with one.
    mixed = torch.ones(3, requires_grad=hvd.rank() == 0)
    assert hvd.allreduce(mixed, op=hvd.Sum).tolist() == [hvd.size()] * 3
    assert hvd.allgather(mixed).tolist() == [1] * 3 * hvd.size()
    assert hvd.broadcast(mixed, 0).tolist() == [1] * 3


# -- compression


class _Hundredth(Compressor):
    """Sends a hundredth of the values, as float64; the context is the dtype."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.double() / 100, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        assert tensor.dtype == torch.float64
        return (tensor * 100).to(ctx)


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
    """Return 5 x 4 with `rank` values; the first index occurs twice, so it is not coalesced."""
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
    # Hybrid tensors, several at once, in another order on every rank.
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


# -- complex numbers, and gradients that are the mathematical ones


def difference(call: Callable[[Any], Any], leaf: Any, *key: int) -> None:
    """Compare the gradient of sum over ranks of <result, w> with the finite difference.

    The gradient is that of the loss of the whole job, which is quadratic in the step.
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
    # Roundings of 1e-16 of values near 100, divided by 2e-3.
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
    if size == 1:  # with more ranks, Horovod's gradients of these are multiples
        calls += [
            lambda t: hvd.allgather(t),
            lambda t: hvd.broadcast(t, 0),
            lambda t: hvd.reducescatter(t, op=hvd.Sum, postscale_factor=2.0),
        ]
    for key, dtype in enumerate((torch.float64, torch.complex128)):
        leaf = leaf_of(rank, (2 * size + 1, 3), 1, key, dtype=dtype)
        for number, call in enumerate(calls):
            difference(call, leaf, key, number)


def case_a_gradient_of_a_broadcast_can_be_differentiated_on_every_rank():
    if hvd.size() == 1:
        return
    own = torch.full((2,), hvd.rank() + 1.0, requires_grad=True)
    received = hvd.broadcast(own, 1, name="twice")
    (first,) = torch.autograd.grad(received.square().sum(), own, create_graph=True)
    first.sum().backward()
    root = hvd.rank() == 1
    assert first.tolist() == [4.0 * root] * 2
    torch.testing.assert_close(own.grad, torch.full((2,), 2.0 * root / hvd.size()))


def case_forward_mode_and_transforms_are_refused() -> None:
    ones = torch.ones(hvd.size())
    verbs = [hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter]
    verbs += [functools.partial(hvd.broadcast, root_rank=0), lambda x: hvd.grouped_allreduce([x])]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(ones, ones)
        for verb in verbs:
            with pytest.raises(NotImplementedError, match="forward mode"):
                verb(dual)
        assert torch.equal(hvd.allreduce(ones), ones)
    for verb in verbs:
        with pytest.raises(ValueError, match=r"(all|reduce|broad)\w+: .* outside of vmap"):
            torch.vmap(verb)(torch.ones(2, hvd.size()))


def case_the_default_device_does_not_matter() -> None:
    """As after torch.set_default_device("cuda"): torch's constructors make tensors elsewhere."""
    size = hvd.size()
    rows = torch.full((size, 2), 1.0, requires_grad=True)
    sparse = torch.eye(3).to_sparse()
    model = torch.nn.ModuleList([torch.nn.Embedding(3, 2, sparse=True), torch.nn.Linear(2, 2)])
    parameters = list(model.parameters())
    codes, inputs = torch.arange(3), torch.ones(2, 2)
    with torch.device("meta"):
        received, splits = hvd.alltoall(rows, splits=[1] * size)
        received.sum().backward()
        total = hvd.sparse_allreduce_async(sparse, name="eye", op=hvd.Sum)()
        hvd.broadcast_parameters(parameters, root_rank=0)
        for method in (hvd.Compression.none, hvd.Compression.powersgd(rank=1)):
            dense = model[1] if method is not hvd.Compression.none else model
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(dense.parameters(), lr=0.1, momentum=0.9), compression=method
            )
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            for _ in range(2):
                (model[1](inputs).sum() + model[0](codes).sum()).backward()
                optimizer.step()
            del optimizer
    assert splits.tolist() == [1] * size
    assert rows.grad is not None
    assert rows.grad.tolist() == [[1.0, 1.0]] * size
    assert total.to_dense().diagonal().tolist() == [size] * 3
    assert all(str(param.device) == "cpu" for param in parameters)


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
            with pytest.raises(ValueError, match=r"allreduce 'a': op=\w+ is not defined for torch"):
                hvd.allreduce(mine, op=op, name="a")
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
    assert hvd.allreduce_(turned, op=hvd.Average) is turned
    assert turned.unique().tolist() == [hvd.size()]
    together = [torch.ones(2), turned]
    assert hvd.grouped_allreduce_(together)[1] is turned
    assert together[0]._version == 1
    complex_ones = torch.ones(2, dtype=torch.complex64)
    with torch.inference_mode():
        kept = complex_ones.clone()
    assert hvd.allreduce_(kept, op=hvd.Sum).tolist() == [hvd.size()] * 2


def case_operations_of_torch_distributed() -> None:
    ops_of_torch = torch.distributed.ReduceOp
    pairs = (
        (ops_of_torch.SUM, hvd.Sum),
        (ops_of_torch.AVG, hvd.Average),
        (ops_of_torch.MIN, hvd.Min),
        (ops_of_torch.MAX, hvd.Max),
        (ops_of_torch.PRODUCT, hvd.Product),
        (ops_of_torch(ops_of_torch.SUM), hvd.Sum),
    )
    for theirs, ours in pairs:
        mine = torch.tensor([1.0 + hvd.rank(), 2.0], requires_grad=ours == hvd.Sum)
        assert torch.equal(hvd.allreduce(mine, op=theirs), hvd.allreduce(mine, op=ours))
        param = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), op=theirs)
        (param * mine.detach()).sum().backward()
        assert torch.equal(param.grad, hvd.allreduce(mine.detach(), op=ours))
        del optimizer
    rows = torch.ones(hvd.size(), requires_grad=True)
    hvd.reducescatter(rows, op=ops_of_torch.SUM).sum().backward()
    expected = rows.grad.clone()
    rows.grad = None
    hvd.reducescatter(rows, op=hvd.Sum).sum().backward()
    assert torch.equal(rows.grad, expected)
    sparse = torch.eye(2).to_sparse()
    total = hvd.sparse_allreduce_async(sparse, "sparse", op=ops_of_torch.SUM)()
    assert torch.equal(total.to_dense(), torch.eye(2) * hvd.size())
    with pytest.raises(errors.UnsupportedOpError, match="BXOR"):
        hvd.allreduce(torch.ones(2), op=ops_of_torch.BXOR)
    with pytest.raises(TypeError, match="not str"):
        hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), op="sum")


def case_unnamed_calls_count_unless_they_are_refused() -> None:
    names.restart_default_names()
    mine = torch.ones(1)
    hvd.allreduce_(mine)
    hvd.allreduce(mine)
    handle = hvd.allreduce_async_(mine)
    with pytest.raises(ValueError, match="no reduce operation"):
        hvd.allreduce_(mine, op=99)
    hvd.synchronize(handle)
    hvd.grouped_allreduce_([mine])
    hvd.broadcast_(mine, 0)
    assert names.counts == {
        ("allreduce", 0): 3, ("grouped_allreduce", 0): 1, ("broadcast", 0): 1
    }  # fmt: skip


def case_threads_that_wait_and_submit_by_turns_do_not_mix_up_results() -> None:
    wrong = []

    def work(thread: int) -> None:
        for step in range(150):
            tensor = torch.full((3,), float(thread * 1000 + step))
            handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"of thread {thread}")
            if hvd.synchronize(handle) is not tensor:
                wrong.append((thread, step))
            elif tensor[0] != hvd.size() * (thread * 1000 + step):
                wrong.append((thread, step, float(tensor[0])))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def case_types_without_arithmetic_are_copied() -> None:
    rank, size = hvd.rank(), hvd.size()
    names = [name for name in handles.DTYPES if hasattr(torch, name)]
    kinds = [getattr(torch, name) for name in names if name not in ("bool", "int4", "uint4")]
    for kind in kinds:
        of_rank = [
            torch.full((2 * size, 2 * kind.itemsize), 1 + each, dtype=torch.uint8).view(kind)
            for each in range(size)
        ]

        def same(found: torch.Tensor, wanted: list[torch.Tensor], kind: torch.dtype = kind) -> None:
            assert found.dtype is kind
            wanted = [each.contiguous().view(torch.uint8) for each in wanted]
            assert torch.equal(found.contiguous().view(torch.uint8), torch.cat(wanted))

        mine = of_rank[rank]
        same(hvd.broadcast(mine, size - 1), of_rank[-1:])
        same(hvd.allgather(mine), of_rank)
        same(hvd.alltoall(mine), [each[2 * rank : 2 * rank + 2] for each in of_rank])
        hvd.broadcast_parameters({"x": mine}, size - 1)
        same(mine, of_rank[-1:])
    if size == 1:
        return
    kind = torch.float8_e5m2 if rank == 0 else torch.float8_e4m3fn
    with pytest.raises(errors.MismatchError, match=r"float8_e5m2.*float8_e4m3fn"):
        hvd.broadcast(torch.zeros(2).to(kind), 0, name="two kinds")


def case_unsupported_types_are_refused_with_a_remedy() -> None:
    short = torch.ones(2).to(torch.float8_e4m3fn)
    reductions = [hvd.allreduce, hvd.reducescatter, lambda t: hvd.grouped_allreduce([t])[0]]
    for call in reductions:
        with pytest.raises(ValueError, match=r"float8_e4m3fn .*not reduced.*Compression\.bf16"):
            call(short)
        with pytest.raises(ValueError, match=r"uint32 .*not reduced; cast it to int64"):
            call(torch.ones(2, dtype=torch.uint32))
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        result = hvd.allreduce(short, compression=compression)
        assert result.dtype == short.dtype
        assert result.float().tolist() == [1, 1]
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(ValueError, match="nested tensors are not supported"):
        hvd.allreduce(nested)


def case_a_rank_that_is_asked_tells_what_it_does() -> None:
    hvd.allreduce(torch.ones(3), name="before it is asked")
    matrix = torch.ones(300, 300)
    here = "in case_a_rank_that_is_asked_tells_what_it_does"
    told = asked_during(lambda: matrix @ matrix, here)
    assert told.events[-1].request == "allreduce 'before it is asked'"
    assert told.events[-1].kind == "done"
    hvd.barrier()


def case_shutdown() -> None:
    hvd.shutdown()
    with pytest.raises(errors.NotInitializedError):
        hvd.allreduce(torch.ones(1, requires_grad=True))


@pytest.mark.parametrize("module", [hvd, hororing.numpy])
def test_verbs_are_pickled_and_copied_as_the_globals_that_they_are(module: Any):
    for verb in (getattr(module, name) for name in set(ops.__all__) & set(module.__all__)):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(verb, protocol)) == verb
        assert copy.copy(verb) == verb
        assert copy.deepcopy([verb]) == [verb]


test_case = session.on_ranks(globals(), 1, 2, 3, 4, session="torch")
