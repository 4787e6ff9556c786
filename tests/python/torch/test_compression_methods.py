"""Compression methods against NumPy references, with all ranks in this process, without an engine.

A method is a generator that yields its requests, so the ranks can run one after the other.
"""

from __future__ import annotations

import compression_oracle as oracle
import numpy as np
import pytest
import torch

from hororing._requests.compression import NoneCompressor, WithoutState
from hororing.torch.compression import Compression
from hororing.torch.compression.method import Kept, Method, Piece, Steps

torch.set_num_threads(1)

RANKS = [1, 2, 3, 4]
SHAPES = [(40, 30), (64, 5, 5), (22, 50)]
SIZES = [int(np.prod(shape)) for shape in SHAPES]
ELEMENTS = sum(SIZES)
STEPS = 4


class Link:
    """Returns requests instead of handles."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def sum(self, tensor, what):
        return "sum", what, tensor

    def gather(self, tensors, what):
        return "gather", what, tensors

    def exchange(self, rows, splits, what):
        return "exchange", what, rows.split(splits)


def carry_out(requests: list[tuple]) -> list:
    """Return the result of a collective for each rank."""
    ((verb, _),) = {request[:2] for request in requests}
    given = [request[2] for request in requests]
    if verb == "sum":
        return [torch.stack(given).sum(0) for _ in given]
    if verb == "gather":
        return [tuple(map(torch.cat, zip(*given, strict=True))) for _ in given]
    return [(torch.cat([rows[rank] for rows in given]), None) for rank in range(len(given))]


def run(steps: list[Steps]) -> list[tuple]:
    """Run the generators of all ranks; return their results."""
    answers: list = [None] * len(steps)
    while True:
        requests, results = [], []
        for step, answer in zip(steps, answers, strict=True):
            try:
                requests.append(step.send(answer))
            except StopIteration as end:
                results.append(end.value)
        if results:
            assert not requests
            return results
        answers = carry_out(requests)


class Ranks:
    """A bucket on several ranks, from step to step."""

    def __init__(self, method: Method, size: int, dtype: torch.dtype = torch.float64) -> None:
        self.method, self.dtype = method, dtype
        self.lengths = [-(-size // method.multiple) * method.multiple for size in SIZES]
        self.begins = np.cumsum([0, *self.lengths]).tolist()
        self.errors = torch.zeros(size, sum(self.lengths), dtype=dtype)
        self.kept: list[list[Kept]] = [[{} for _ in SHAPES] for _ in range(size)]

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(self.begins, SIZES, strict=False)
        return [flat[..., begin : begin + size] for begin, size in pairs]

    def reduce(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return the sum of the rows, which must be equal on all ranks."""
        for part, given in zip(self.parts(self.errors), gradients.split(SIZES, 1), strict=True):
            part += given
        size = len(gradients)
        steps = []
        for rank, flat in enumerate(self.errors):
            given = [torch.empty(shape, dtype=self.dtype) for shape in SHAPES]
            piece = Piece(flat, self.lengths, given, ["a", "b", "c"], self.kept[rank], divisor=2)
            steps.append(self.method.reduce(piece, Link(rank, size)))
        results = run(steps)
        self.kept = [kept for _, kept, _ in results]
        totals = [2 * torch.cat([part.reshape(-1) for part in parts]) for parts, _, _ in results]
        assert len({total.numpy().tobytes() for total in totals}) == 1
        assert all(bool(finite) == bool(totals[0].isfinite().all()) for _, _, finite in results)
        return totals[0]


def gradients(size: int, step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * size + step)
    scales = torch.logspace(-3, 1, ELEMENTS, dtype=dtype)
    return torch.randn(size, ELEMENTS, dtype=dtype, generator=made) * scales


METHODS = [Compression.int8, Compression.powersgd, Compression.topk]


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("block", [4, 256, 4096])
def test_int8_is_as_the_reference(size: int, block: int):
    ranks = Ranks(Compression.int8(block=block), size)
    reference = oracle.Int8(size, SIZES, block)
    for step in range(STEPS):
        given = gradients(size, step)
        expected = reference.reduce(given.numpy())
        np.testing.assert_allclose(ranks.reduce(given), expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(ranks.errors, reference.errors, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("ratio", [0.0001, 0.01, 1.0])
def test_topk_is_as_the_reference(size: int, ratio: float):
    ranks, reference = (
        Ranks(Compression.topk(ratio=ratio), size),
        oracle.TopK(size, SIZES, ratio),
    )
    for step in range(STEPS):
        given = gradients(size, step)
        expected = reference.reduce(given.numpy())
        np.testing.assert_allclose(ranks.reduce(given), expected, rtol=1e-12)
        np.testing.assert_allclose(ranks.errors, reference.errors, rtol=1e-12)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("rank", [1, 4])
def test_powersgd_is_as_the_reference(size: int, rank: int):
    method = Compression.powersgd(rank=rank)
    ranks = Ranks(method, size)
    bounds = np.cumsum([0, *(np.prod(shape) for shape in SHAPES)])
    parts = [slice(*bounds[at : at + 2]) for at in range(3)]
    references = []
    for name, shape in zip("abc", SHAPES, strict=True):
        matrix = torch.zeros(shape[0], int(np.prod(shape[1:])), dtype=torch.float64)
        first = method._first(name, matrix).numpy()
        references.append(oracle.PowerSGD(size, tuple(matrix.shape), first))
    for step in range(STEPS):
        given = gradients(size, step)
        reduced = ranks.reduce(given)
        for part, reference in zip(parts, references, strict=True):
            expected = reference.reduce(given[:, part].numpy())
            np.testing.assert_allclose(reduced[part], expected, rtol=1e-7, atol=1e-9)
            errors = reference.errors.reshape(size, -1)
            np.testing.assert_allclose(ranks.errors[:, part], errors, rtol=1e-7, atol=1e-9)


def test_powersgd_finds_a_matrix_of_low_rank():
    made = torch.Generator().manual_seed(1)
    left, right = (torch.randn(n, 2, generator=made, dtype=torch.float64) for n in (40, 30))
    given = torch.zeros(2, ELEMENTS, dtype=torch.float64)
    given[:, : 40 * 30] = (left @ right.t()).reshape(-1)
    reduced = Ranks(Compression.powersgd(rank=2), 2).reduce(given)
    torch.testing.assert_close(reduced, given.sum(0))


def test_powersgd_leaves_out_what_it_would_not_make_smaller():
    method = Compression.powersgd(rank=4)
    assert method.compresses(torch.zeros(64, 64))
    assert not method.compresses(torch.zeros(4096))
    assert not method.compresses(torch.zeros(512, 8))
    assert not method.compresses(torch.zeros(8, 8))
    assert not method.compresses(torch.zeros(64, 64, dtype=torch.complex64))


@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite_stays_so(method):
    for value in (float("inf"), float("-inf"), float("nan")):
        given = gradients(2, 0, torch.float32)
        given[1, 17] = value
        assert not Ranks(method, 2, torch.float32).reduce(given).isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_zeros_stay_zeros(method):
    ranks = Ranks(method, 3)
    assert not ranks.reduce(torch.zeros(3, ELEMENTS, dtype=torch.float64)).any()
    assert not ranks.errors.any()


def test_int8_rounds_to_half_a_step():
    # |rounding| <= s / 2 per rank and for the sum, s = max / 127.
    given = gradients(4, 0)
    ranks = Ranks(Compression.int8, 4)
    error = (ranks.reduce(given) - given.sum(0)).abs()
    assert error.max() <= (4 + 4 + 1e-3) * given.abs().max() / 127 / 2


GROUPS: list[object] = []  # kept to the end


def test_powersgd_is_as_the_hook_of_torch():
    # With one rank: both just sum over ranks, like the reference above.
    dist = pytest.importorskip("torch.distributed")
    hooks = pytest.importorskip("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    rank, shape, seed, first_step = 3, (40, 30), 0, 2
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # The hook's last future lets the group go in a thread of gloo. If that was the last reference,
    # the group's destructor joins its own thread, and the process aborts.
    GROUPS.append(dist.group.WORLD)
    try:
        model = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=torch.float64)
        state = hooks.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=first_step, random_seed=seed
        )
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(state, hooks.powerSGD_hook)
        # The initial factor, as in torch's source.
        torch.manual_seed(np.random.RandomState(seed).randint(1_000_000_000))
        q = torch.randn(1, shape[1], rank, dtype=torch.float64)[0]
        kept: list[Kept] = [{"q": q}]
        error = torch.zeros(shape, dtype=torch.float64)
        made = torch.Generator().manual_seed(3)
        for step in range(first_step + 5):
            inputs = torch.randn(50, shape[1], generator=made, dtype=torch.float64)
            factors = torch.randn(50, shape[0], generator=made, dtype=torch.float64)
            model.zero_grad()
            (ddp(inputs) * factors).sum().backward()
            if step < first_step:  # not compressed yet
                continue
            error += factors.t() @ inputs
            flat = error.view(-1)
            steps = Compression.powersgd(rank=rank).reduce(
                Piece(flat, [len(flat)], [torch.empty_like(error)], ["weight"], kept, 1), Link(0, 1)
            )
            (((result,), kept, _),) = run([steps])
            torch.testing.assert_close(result, model.weight.grad)
    finally:
        dist.destroy_process_group()


def test_adapters_without_them_say_so():
    class Compressors(metaclass=WithoutState):
        none = NoneCompressor

    assert Compressors.none is NoneCompressor
    for name in ("int8", "powersgd", "topk", "auto"):
        assert getattr(Compression, name).scope == "all"
        assert not hasattr(Compressors, name)
        with pytest.raises(AttributeError, match=rf"Compression\.{name} keeps errors"):
            getattr(Compressors, name)
    with pytest.raises(AttributeError, match="no attribute 'fp8'"):
        Compressors.fp8  # noqa: B018
