"""Weighted averages: any split of a batch over ranks and passes gives the result of one process."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import mpirun
import numpy as np
import pytest
import session
import torch
from torch import nn
from weighted_oracle import check_numpy, draws, weighted_mean

import hororing.torch as hvd
from hororing.errors import MismatchError

BATCH = 24

# ---------------------------------------------------------------------------------------------
# On the ranks


def case_init() -> None:
    hvd.init(process_sets="dynamic")


def case_averages_of_numpy_are_weighted_in_the_accumulation_type() -> None:
    check_numpy((1, 33, 60_000))


def case_every_form_takes_a_weight() -> None:
    rng, rank = draws(1), hvd.rank()
    weights = (rng.integers(0, 4, hvd.size()) + 0.5).tolist()
    all_given = [torch.tensor(rng.uniform(-1, 1, (2, 5))) for _ in range(hvd.size())]
    wanted = torch.tensor(weighted_mean([each.numpy() for each in all_given], weights))
    given, weight = all_given[rank], weights[rank]

    def check(result: torch.Tensor, factor: float = 1.0) -> None:
        assert torch.allclose(result, wanted * factor, rtol=1e-12, atol=1e-12)

    check(hvd.allreduce(given, weight=weight))
    check(hvd.allreduce_(given.clone(), weight=weight))
    check(hvd.synchronize(hvd.allreduce_async(given, weight=weight)))
    check(hvd.synchronize(hvd.allreduce_async_(given.clone(), weight=weight)))
    check(hvd.allreduce(given, prescale_factor=3.0, postscale_factor=0.5, weight=weight), 1.5)
    half = hvd.allreduce(given.float(), compression=hvd.Compression.fp16, weight=weight)
    assert torch.allclose(half.double(), wanted, atol=2e-3)
    for group in (
        hvd.grouped_allreduce([given, given * 2], weight=weight),
        hvd.grouped_allreduce_([given.clone(), given * 2], weight=weight),
        hvd.synchronize(hvd.grouped_allreduce_async([given, given * 2], weight=weight)),
        hvd.synchronize(hvd.grouped_allreduce_async_([given.clone(), given * 2], weight=weight)),
    ):
        check(group[0])
        check(group[1], 2.0)
    # Weighted and plain requests in one batch, by their ids, with a new weight each time.
    for step in range(4):
        mine = [weight * (step + 1), weight]
        handles = [
            hvd.allreduce_async(given, name="side.0", weight=mine[0]),
            hvd.allreduce_async(given, name="side.1", op=hvd.Sum),
            hvd.allreduce_async(given, name="side.2", weight=mine[1]),
        ]
        first, plain, last = [hvd.synchronize(handle) for handle in handles]
        check(first)
        check(last)
        assert torch.allclose(plain, torch.stack(all_given).sum(0))


def case_its_gradient_is_the_share_of_the_sum() -> None:
    weights = [rank + 0.5 for rank in range(hvd.size())]
    given = torch.ones(3, dtype=torch.float64, requires_grad=True)
    result = hvd.allreduce(given, weight=weights[hvd.rank()])
    result.backward(torch.full((3,), hvd.rank() + 1.0, dtype=torch.float64))
    upstream = hvd.size() * (hvd.size() + 1) / 2
    assert given.grad is not None
    share = weights[hvd.rank()] / sum(weights)
    assert torch.allclose(given.grad, torch.full_like(given.grad, share * upstream))


def case_a_weight_that_is_none_is_an_error_everywhere() -> None:
    ones = torch.ones(2)
    for bad in (-1.0, math.nan, math.inf):
        for giver in range(hvd.size()):
            with pytest.raises(ValueError, match=r"weights must be finite and not negative"):
                hvd.allreduce(ones, name="bad", weight=bad if hvd.rank() == giver else 1.0)
            assert hvd.allreduce(ones, name="bad", weight=1.0).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"weight is for op=Average of floats only, not op=Sum"):
        hvd.allreduce(ones, op=hvd.Sum, weight=1.0)
    with pytest.raises(ValueError, match=r"floats only, not op=Average of int32"):
        hvd.allreduce(ones.int(), weight=1.0)
    with pytest.raises(TypeError, match=r"weight must be a number, not str"):
        hvd.allreduce(ones, weight="2")  # type: ignore[arg-type]
    if hvd.size() > 1:
        with pytest.raises(MismatchError, match=r"weights differ: rank 0: given"):
            hvd.allreduce(ones, weight=1.0 if hvd.rank() == 0 else None)


def case_a_rank_that_has_joined_has_no_weight() -> None:
    joins = hvd.rank() == hvd.size() - 1 and hvd.size() > 1
    if not joins:
        others = list(range(max(1, hvd.size() - 1)))
        wanted = sum((rank + 1.0) * (rank + 2) for rank in others) / sum(
            rank + 2 for rank in others
        )
        for name in (None, "j", "j"):
            ones = torch.full((70_000,), hvd.rank() + 1.0, dtype=torch.float64)
            result = hvd.allreduce(ones, name=name, weight=hvd.rank() + 2)
            assert torch.allclose(result, torch.full_like(result, wanted), rtol=1e-12)
    hvd.join()


# ---------------------------------------------------------------------------------------------
# Optimizers

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(mpirun.seed() % 1000)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).to(dtype)


def mean_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not len(x):  # NaN, the mean of an empty tensor
        return torch.stack([param.sum() for param in model.parameters()]).sum() * math.nan
    return ((model(x) - y) ** 2).sum() / len(x)


def parts(rng: np.random.Generator, count: int) -> list[slice]:
    """Return a random split of the batch; parts may be empty."""
    bounds = [0, *sorted(rng.integers(0, BATCH + 1, count - 1).tolist()), BATCH]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def batch_of(rng: np.random.Generator, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.tensor(rng.normal(size=(BATCH, 6))).to(dtype),
        torch.tensor(rng.normal(size=(BATCH, 2))).to(dtype),
    )


def compare(model: nn.Module, twin: nn.Module, unit: float, gradients: bool = False) -> None:
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        a, b = (mine.grad, other.grad) if gradients else (mine, other)
        assert a is not None
        assert b is not None
        error = (a.double() - b.double()).abs().max().item()
        assert error <= unit, error


def train(
    key: int, *, passes: int = 1, dtype: torch.dtype = torch.float64, unit: float = 1e-12,
    steps: int = 4, skips: bool = False, **options: object,
) -> None:  # fmt: skip
    """Train with random splits of every batch, and compare with one process."""
    rng = draws(key)
    model = network(dtype)
    twin = copy.deepcopy(model)
    plain = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model.named_parameters(),
        backward_passes_per_step=passes,
        **options,  # type: ignore[arg-type]
    )
    for step in range(steps):
        x, y = batch_of(rng, dtype)
        split = parts(rng, hvd.size() * passes)
        optimizer.zero_grad()
        nothing = skips and step == 1
        for place in range(passes):
            mine = split[hvd.rank() * passes + place]
            mine = slice(0, 0) if nothing else mine
            optimizer.weight = mine.stop - mine.start
            mean_loss(model, x[mine], y[mine]).backward()
        if not nothing:
            twin.zero_grad()
            mean_loss(twin, x, y).backward()
            compare(model, twin, unit, gradients=True)
            plain.step()
        optimizer.step()
        compare(model, twin, unit)
    assert optimizer.weight is not None


def case_any_split_of_a_batch_is_the_whole_batch() -> None:
    for key in range(4):
        train(10 + key)


def case_over_several_passes_each_with_its_weight() -> None:
    for passes in (2, 3):
        for key in range(3):
            train(20 + 10 * passes + key, passes=passes)


def case_a_pass_need_not_use_all_parameters() -> None:
    rng = draws(50)
    for passes in (1, 2, 3):
        model = nn.ModuleList([nn.Linear(6, 2).double() for _ in range(3)])
        twin = copy.deepcopy(model)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=passes
        )
        for _ in range(3):
            x, y = batch_of(rng, torch.float64)
            used = rng.integers(0, 3, (hvd.size(), passes)).tolist()
            weights = rng.integers(0, 4, (hvd.size(), passes)).tolist()
            weights[0][0] = 1
            optimizer.zero_grad()
            for branch, weight in zip(used[hvd.rank()], weights[hvd.rank()], strict=True):
                optimizer.weight = weight
                mean_loss(model[branch], x, y).backward()
            optimizer.synchronize()
            twin.zero_grad()
            total = sum(map(sum, weights))
            flat = itertools.chain.from_iterable
            for branch, weight in zip(flat(used), flat(weights), strict=True):
                (mean_loss(twin[branch], x, y) * weight / total).backward()
            for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
                wanted = torch.zeros_like(mine) if other.grad is None else other.grad
                assert mine.grad is not None
                assert torch.allclose(mine.grad, wanted, rtol=1e-12, atol=1e-13)


def case_where_all_weights_are_zero_nothing_changes() -> None:
    train(60, skips=True)
    train(61, passes=2, skips=True)


def case_with_groups_and_compression() -> None:
    train(70, groups=2)
    train(71, groups=1, passes=2)
    train(72, dtype=torch.float32, unit=2e-2, compression=hvd.Compression.fp16)
    train(73, dtype=torch.float32, unit=5e-2, compression=hvd.Compression.bf16)
    train(74, dtype=torch.float32, unit=1e-5, groups=2)
    train(75, gradient_predivide_factor=2.0)


def case_in_a_process_set() -> None:
    members = list(range(0, hvd.size(), 2))
    chosen = hvd.add_process_set(members) if hvd.size() > 1 else hvd.global_process_set
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), process_set=chosen
    )
    optimizer.weight = hvd.rank() + 1
    x, y = batch_of(draws(80), torch.float64)
    rows = {rank: slice(2 * rank, 2 * rank + 3) for rank in range(hvd.size())}
    mean_loss(model, x[rows[hvd.rank()]], y[rows[hvd.rank()]]).backward()
    if chosen.included():
        twin = network()
        total = sum(rank + 1 for rank in members)
        loss = sum(mean_loss(twin, x[rows[r]], y[rows[r]]) * (r + 1) / total for r in members)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        compare(model, twin, 1e-12, gradients=True)
    optimizer.step()


def case_with_a_scaler() -> None:
    rng = draws(81)
    model = network(torch.float32)
    twin = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters()
    )
    plain = torch.optim.SGD(twin.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        x, y = batch_of(rng, torch.float32)
        mine = parts(rng, hvd.size())[hvd.rank()]
        mine = slice(0, 0) if step == 1 else mine
        optimizer.zero_grad()
        optimizer.weight = mine.stop - mine.start
        scaler.scale(mean_loss(model, x[mine], y[mine])).backward()
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            plain.zero_grad()
            mean_loss(twin, x, y).backward()
            plain.step()
        compare(model, twin, 1e-5)


def case_ranks_join_when_their_data_is_over() -> None:
    rng = draws(82)
    model = network()
    twin = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters()
    )
    plain = torch.optim.SGD(twin.parameters(), lr=0.05)
    for step in range(3):
        x, y = batch_of(rng, torch.float64)
        active = hvd.size() if step < 1 else max(1, hvd.size() - 1)
        split = parts(rng, active)
        if hvd.rank() >= active:
            break
        optimizer.zero_grad()
        optimizer.weight = split[hvd.rank()].stop - split[hvd.rank()].start
        mean_loss(model, x[split[hvd.rank()]], y[split[hvd.rank()]]).backward()
        optimizer.step()
        plain.zero_grad()
        mean_loss(twin, x, y).backward()
        plain.step()
        compare(model, twin, 1e-12)
    hvd.join()


def case_sparse_gradients_are_weighted() -> None:
    for dense in (False, True):
        table = nn.Embedding(7, 3, sparse=True).double()
        table.weight.data.fill_(1.0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(),
            sparse_as_dense=dense,
        )  # fmt: skip
        optimizer.weight = hvd.rank() + 1
        table(torch.tensor([hvd.rank() % 7, 6])).sum().backward()
        optimizer.step()
        total = hvd.size() * (hvd.size() + 1) / 2
        for rank in range(min(hvd.size(), 6)):
            wanted = 1 - (rank + 1) / total
            assert torch.allclose(table.weight[rank], torch.full((3,), wanted).double())
        assert torch.allclose(table.weight[6], torch.zeros(3).double(), atol=1e-12)


def case_weights_do_not_overflow_sparse_16_bit_gradients() -> None:
    table = nn.Embedding(7, 3, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(),
        compression=hvd.Compression.fp16,
    )  # fmt: skip
    optimizer.weight = 50_000.0
    table(torch.tensor([2] * (1 + hvd.rank()))).mul(8.0).sum().backward()
    assert table.weight.grad is not None
    wanted = torch.zeros(7, 3)
    wanted[2] = 4.0 * (hvd.size() + 1)
    assert torch.allclose(table.weight.grad.to_dense(), wanted, rtol=1e-3)


def case_frozen_parameters_may_get_a_weight_and_thaw() -> None:
    for frozen_before, weight_by_pass in ((False, True), (True, True), (True, False)):
        model = nn.ModuleList([nn.Linear(6, 2).double() for _ in range(2)])
        model[0].requires_grad_(not frozen_before)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=2
        )
        optimizer.weight = 2.0
        x, y = batch_of(draws(90), torch.float64)
        for frozen in (True, False):
            model[0].requires_grad_(not frozen)
            optimizer.zero_grad()
            for weight in (1.0, 3.0):
                if weight_by_pass:
                    optimizer.weight = weight
                loss = mean_loss(model[1], x, y) + (0.0 if frozen else mean_loss(model[0], x, y))
                (weight * loss).backward()
            for layer in model[frozen:]:
                (wanted,) = torch.autograd.grad(mean_loss(layer, x, y), layer.weight)
                factor = 2.5 if weight_by_pass else 2.0
                assert torch.allclose(layer.weight.grad, wanted * factor)
            optimizer.step()


def case_compiled_autograd_does_not_weigh_passes_and_says_so() -> None:
    from torch._dynamo import compiled_autograd

    layer = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=0.1), backward_passes_per_step=2
    )
    optimizer.weight = 1.0
    compiler = torch.compile(backend="eager")
    with compiled_autograd._enable(compiler), pytest.raises(NotImplementedError, match="compiled"):
        layer(torch.ones(1, 2)).sum().backward()


def case_a_closure_has_a_weighted_loss() -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batch_of(draws(83), torch.float64)
    split = parts(draws(84), hvd.size())
    mine = split[hvd.rank()]
    optimizer.weight = mine.stop - mine.start
    wanted = mean_loss(copy.deepcopy(model), x, y).item()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = mean_loss(model, x[mine], y[mine])
        loss.backward()
        return loss

    assert abs(float(optimizer.step(closure)) - wanted) < 1e-12


def case_weights_can_be_given_up_and_wrong_ones_are_refused() -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer.weight is None
    for bad in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"weight=.* must be finite and not negative"):
            optimizer.weight = bad
    with pytest.raises(TypeError, match=r"weight must be a number, not str"):
        optimizer.weight = "3"
    x, y = batch_of(draws(85), torch.float64)
    rows = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
    seen = []
    for weight in (3, None, 2):
        optimizer.weight = weight
        optimizer.zero_grad()
        mean_loss(model, x[rows], y[rows]).backward()
        seen.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(2)
    for weight, part in ((1, rows), (3, rows)):
        optimizer.weight = weight
        mean_loss(model, x[part], y[part]).backward()
    for param, before in zip(model.parameters(), seen[0], strict=True):
        assert param.grad is not None
        assert torch.allclose(param.grad, before, rtol=1e-12, atol=1e-14)
    for a, b, c in zip(*seen, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)
        assert torch.allclose(a, c, rtol=1e-12, atol=1e-14)
    summing = hvd.DistributedOptimizer(torch.optim.SGD(network().parameters(), lr=0.1), op=hvd.Sum)
    with pytest.raises(ValueError, match=r"weight is for op=Average only, not op=Sum"):
        summing.weight = 1


def case_a_weight_on_some_ranks_only_is_an_error_everywhere() -> None:
    for options in ({}, {"groups": 1}, {"backward_passes_per_step": 2}):
        model = network()
        passes = options.get("backward_passes_per_step", 1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
            **options,  # type: ignore[arg-type]
        )  # fmt: skip
        x, y = batch_of(draws(86), torch.float64)
        for everywhere in (hvd.size() == 1, True):
            optimizer.zero_grad()
            optimizer.weight = hvd.rank() + 1 if everywhere or hvd.rank() == 0 else None
            for _ in range(passes - 1):
                mean_loss(model, x, y).backward()
            if everywhere:
                mean_loss(model, x, y).backward()
            else:
                with pytest.raises(MismatchError, match="weights differ"):
                    mean_loss(model, x, y).backward()
        twin = network()
        mean_loss(twin, x, y).backward()
        compare(model, twin, 1e-12, gradients=True)


test_case = session.on_ranks(globals(), 1, 2, 3, 4, session="torch")
