"""Training with DistributedOptimizer on N ranks equals training in one process on all the data.

Every rank knows the whole batch, takes its share of it, and trains a twin of the model on all of
it with the plain optimizer: that is the oracle, which knows nothing of ranks.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterator

import mpirun
import pytest
import session
import torch
from torch import nn

import hororing.torch as hvd

BATCH = 24  # a multiple of 1, 2, 3 and 4 ranks
STEPS = 6
TOLERANCE = 1e-12  # sums of at most 24 numbers of about 1, in another order

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def start() -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(mpirun.seed())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


def batches(steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(BATCH, 5), torch.randn(BATCH, 3)) for _ in range(steps)]


def share(whole: torch.Tensor, rank: int | None = None) -> torch.Tensor:
    return whole[hvd.rank() if rank is None else rank :: hvd.size()]


def squares(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def gradients_by_rank(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, loss: Loss = squares
) -> list[list[torch.Tensor]]:
    """What backward gives on each rank, before anything is reduced."""
    result = []
    for rank in range(hvd.size()):
        twin = copy.deepcopy(model)
        loss(twin, share(inputs, rank), share(targets, rank)).backward()
        result.append(
            [torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters()]
        )
    return result


def assert_same(model: nn.Module, twin: nn.Module, tolerance: float = TOLERANCE) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert_equal_on_all_ranks(*model.parameters())


def assert_equal_on_all_ranks(*tensors: torch.Tensor) -> None:
    """Bit for bit."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    everywhere = hvd.allgather(flat.unsqueeze(0))
    assert all(torch.equal(row, flat) for row in everywhere)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data, loss: Loss = squares) -> None:
    for inputs, targets in data:
        optimizer.zero_grad()
        loss(model, share(inputs), share(targets)).backward()
        optimizer.step()


def train_alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, data, loss: Loss = squares
) -> None:
    for inputs, targets in data:
        optimizer.zero_grad()
        loss(model, inputs, targets).backward()
        optimizer.step()


def assert_trains_as_alone(make: Make, named: bool = True, **options: object) -> None:
    model = network()
    twin = copy.deepcopy(model)
    optimizer = make(model.parameters())
    names = model.named_parameters() if named else None
    assert hvd.DistributedOptimizer(optimizer, names, **options) is optimizer
    data = batches()
    train(model, optimizer, data)
    train_alone(twin, make(twin.parameters()), data)
    assert_same(model, twin)


sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def plain_sgd(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


# ---------------------------------------------------------------------------------------------
# The same result as one process


def case_start():
    start()


def case_sgd_trains_as_one_process():
    assert_trains_as_alone(sgd)
    assert_trains_as_alone(functools.partial(sgd, nesterov=True, weight_decay=0.1))
    assert_trains_as_alone(functools.partial(sgd, foreach=True))


def case_adam_and_adamw_train_as_one_process():
    assert_trains_as_alone(functools.partial(torch.optim.Adam, lr=0.02))
    assert_trains_as_alone(functools.partial(torch.optim.AdamW, lr=0.02, amsgrad=True))
    assert_trains_as_alone(functools.partial(torch.optim.AdamW, lr=0.02, fused=True))


def case_names_are_not_needed():
    assert_trains_as_alone(sgd, named=False)
    model = network()
    optimizer = hvd.DistributedOptimizer(plain_sgd(model.parameters()))
    another = hvd.DistributedOptimizer(plain_sgd(network().parameters()))
    names = [*optimizer._parameter_names.values(), *another._parameter_names.values()]
    assert len(set(names)) == 12


def case_parameter_groups_keep_their_options():
    model = network()
    twin = copy.deepcopy(model)

    def make(module: nn.Module) -> torch.optim.Optimizer:
        slow, fast = list(module.parameters())[:3], list(module.parameters())[3:]
        return torch.optim.SGD(
            [{"params": slow, "lr": 0.01}, {"params": fast, "momentum": 0.5}], lr=0.1
        )

    data = batches()
    train(model, hvd.DistributedOptimizer(make(model), model.named_parameters()), data)
    train_alone(twin, make(twin), data)
    assert_same(model, twin)


def case_groups_do_not_change_the_result():
    for groups in (1, 2, 5, 1000):
        assert_trains_as_alone(sgd, groups=groups)
    for pick in ([[0, 5], [1, 2]], [(4, 2, 0)], [[index] for index in range(6)]):
        model = network()
        twin = copy.deepcopy(model)
        params = list(model.parameters())
        groups = [type(positions)(params[at] for at in positions) for positions in pick]
        optimizer = hvd.DistributedOptimizer(sgd(params), model.named_parameters(), groups=groups)
        data = batches()
        train(model, optimizer, data)
        train_alone(twin, sgd(twin.parameters()), data)
        assert_same(model, twin)


def case_a_group_has_one_order_although_its_gradients_arrive_in_another_on_each_rank():
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(sgd([first, second]), groups=[[first, second]])
    losses = [(first, 1.0), (second, 100.0)]
    # Autograd runs first what was computed last.
    parts = [factor * param.sum() for param, factor in losses[:: 1 if hvd.rank() % 2 else -1]]
    (parts[0] + parts[1]).backward()
    optimizer.synchronize()
    for param, factor in losses:
        assert torch.equal(param.grad, torch.full((2,), factor))


def case_num_groups_works_and_warns():
    with pytest.warns(DeprecationWarning, match="num_groups.*use `groups`"):
        assert_trains_as_alone(sgd, num_groups=2)
    with (
        pytest.warns(DeprecationWarning, match="num_groups"),
        pytest.raises(ValueError, match="exclude each other"),
    ):
        hvd.DistributedOptimizer(sgd(network().parameters()), num_groups=2, groups=2)
    with (
        pytest.warns(DeprecationWarning, match="num_groups"),
        pytest.raises(ValueError, match="groups=-2"),
    ):
        hvd.DistributedOptimizer(sgd(network().parameters()), num_groups=-2)


def case_a_predivide_factor_does_not_change_the_average():
    for factor in (0.5, 3.0, float(hvd.size())):
        assert_trains_as_alone(sgd, gradient_predivide_factor=factor)
        assert_trains_as_alone(sgd, gradient_predivide_factor=factor, groups=2)


def case_a_predivide_factor_prevents_overflow_of_float16():
    param = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([param], lr=1.0),
        compression=hvd.Compression.fp16,
        gradient_predivide_factor=float(hvd.size()),
    )
    (param * 60000.0).sum().backward()
    optimizer.step()
    torch.testing.assert_close(param.grad, torch.full((3,), 60000.0, dtype=torch.float16))


# ---------------------------------------------------------------------------------------------
# Operations and compression


def reduced_gradients(model: nn.Module, inputs, targets, **options) -> list[torch.Tensor]:
    optimizer = hvd.DistributedOptimizer(
        plain_sgd(model.parameters()), model.named_parameters(), **options
    )
    squares(model, share(inputs), share(targets)).backward()
    optimizer.synchronize()
    result = [param.grad for param in model.parameters()]
    assert_equal_on_all_ranks(*result)
    return result


def case_every_operation_reduces_gradients():
    model = network()
    ((inputs, targets),) = batches(1)
    expected = {
        hvd.Average: lambda stack: stack.mean(dim=0),
        hvd.Sum: lambda stack: stack.sum(dim=0),
        hvd.Min: lambda stack: stack.amin(dim=0),
        hvd.Max: lambda stack: stack.amax(dim=0),
        hvd.Product: lambda stack: stack.prod(dim=0),
    }
    by_rank = gradients_by_rank(model, inputs, targets)
    for op, combine in expected.items():
        for groups in (None, 2):
            twin = copy.deepcopy(model)
            result = reduced_gradients(twin, inputs, targets, op=op, groups=groups)
            for mine, *parts in zip(result, *by_rank, strict=True):
                torch.testing.assert_close(
                    mine, combine(torch.stack(parts)), rtol=1e-12, atol=1e-15
                )


def case_compressed_gradients_are_rounded_no_more_than_their_type_must():
    model = network()
    ((inputs, targets),) = batches(1)
    by_rank = gradients_by_rank(model, inputs, targets)
    for compression, dtype in (
        (hvd.Compression.fp16, torch.float16),
        (hvd.Compression.bf16, torch.bfloat16),
    ):
        for groups in (None, 3):
            result = reduced_gradients(
                copy.deepcopy(model), inputs, targets, compression=compression, groups=groups
            )
            for mine, *parts in zip(result, *by_rank, strict=True):
                assert mine.dtype is torch.float64
                if hvd.size() > 1:
                    assert torch.equal(mine, mine.to(dtype).double())  # they really travelled so
                # Rounded once before and once after the sum, each by half an eps of the largest
                # part at most (a little more, as the second rounds what the first has raised), or
                # by half of the smallest number there is.
                limits = torch.finfo(dtype)
                largest = torch.stack(parts).abs().amax(dim=0)
                bound = limits.eps * (1 + limits.eps) * largest + limits.tiny * limits.eps
                assert bool(((mine - torch.stack(parts).mean(dim=0)).abs() <= bound).all())


def case_any_class_with_two_functions_is_a_compressor():
    class Halved(hvd.Compression.none):
        @staticmethod
        def compress(tensor):
            return tensor / 2, tensor.shape

        @staticmethod
        def decompress(tensor, ctx):
            assert tensor.shape == ctx
            return tensor * 2

    assert_trains_as_alone(sgd, compression=Halved)


# ---------------------------------------------------------------------------------------------
# Several backward passes per step


def case_gradients_add_up_over_backward_passes():
    for groups in (None, 2):
        model = network()
        twin = copy.deepcopy(model)
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()),
            model.named_parameters(),
            backward_passes_per_step=3,
            groups=groups,
        )
        plain = sgd(twin.parameters())

        def step(passes: int, model=model, twin=twin, optimizer=optimizer, plain=plain) -> None:
            optimizer.zero_grad()
            plain.zero_grad()
            for inputs, targets in batches(passes):
                squares(model, share(inputs), share(targets)).backward()
                squares(twin, inputs, targets).backward()
            optimizer.step()
            plain.step()
            assert_same(model, twin)

        step(3)
        step(3)
        step(2)  # fewer are fine: step() sends what is there
        step(3)
        optimizer.set_backward_passes_per_step(2)
        assert optimizer.backward_passes_per_step == 2
        step(2)
        step(2)
        optimizer.set_backward_passes_per_step(1)
        step(1)
        optimizer.set_backward_passes_per_step(4)
        step(4)


def case_one_backward_pass_too_many_is_refused_by_name():
    """Where it would sum sums. Averages may be averaged again (test_torch_backward.py)."""
    for passes in (1, 2):
        model = network()
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()),
            model.named_parameters(),
            backward_passes_per_step=passes,
            op=hvd.Sum,
        )
        inputs, targets = batches(1)[0]
        for _ in range(passes):
            squares(model, inputs, targets).backward()
        if hvd.size() > 1:
            text = rf"'4\.\w+' .* backward_passes_per_step \({passes}\) .*op=Sum .*\.zero_grad\(\)"
            with pytest.raises(AssertionError, match=text):
                squares(model, inputs, targets).backward()
        optimizer.zero_grad()
        for _ in range(passes):
            squares(model, inputs, targets).backward()
        optimizer.step()
        assert_equal_on_all_ranks(*model.parameters())


def case_zero_grad_between_passes_starts_over():
    model = network()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), backward_passes_per_step=2
    )
    ((inputs, targets),) = batches(1)
    squares(model, inputs, targets).backward()
    optimizer.zero_grad()
    for _ in range(2):
        squares(model, inputs, targets).backward()
    optimizer.step()


# ---------------------------------------------------------------------------------------------
# synchronize, skip_synchronize, zero_grad


def case_gradients_may_be_clipped_between_synchronize_and_step():
    model = network()
    twin = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    plain = sgd(twin.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for inputs, targets in batches():
            optimizer.zero_grad()
            squares(model, share(inputs), share(targets)).backward()
            optimizer.synchronize()
            mine = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
            plain.zero_grad()
            squares(twin, inputs, targets).backward()
            theirs = nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
            plain.step()
            assert theirs > 0.05
            assert math.isclose(mine, theirs, rel_tol=1e-12)
    assert_same(model, twin)


def case_step_after_synchronize_warns_and_does_not_reduce_again():
    model = network()
    twin = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        plain_sgd(model.parameters()), model.named_parameters(), op=hvd.Sum
    )
    ((inputs, targets),) = batches(1)
    squares(model, share(inputs), share(targets)).backward()
    optimizer.synchronize()
    if hvd.size() > 1:
        # Horovod's words: scripts filter them.
        words = r"optimizer\.step\(\) called without optimizer\.skip_synchronize\(\)"
        with pytest.warns(UserWarning, match=words) as caught:
            optimizer.step()
        assert caught[0].filename == __file__
    else:
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.zero_grad()
        plain = plain_sgd(twin.parameters())
        # A mean over all is an N-th of the sum of the ranks' means.
        (hvd.size() * squares(twin, inputs, targets)).backward()
        plain.step()
        assert_same(model, twin)
        squares(model, share(inputs), share(targets)).backward()
        optimizer.step()


def case_skip_synchronize_needs_no_synchronize():
    model = network()
    twin = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    ((inputs, targets),) = batches(1)
    squares(model, share(inputs), share(targets)).backward()
    with optimizer.skip_synchronize():
        optimizer.step()
    train_alone(twin, sgd(twin.parameters()), [(inputs, targets)])
    assert_same(model, twin)


def case_zero_grad_after_backward_drops_the_gradients():
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    ((inputs, targets),) = batches(1)
    squares(model, share(inputs), share(targets)).backward()
    assert_equal_on_all_ranks(*(param.grad for param in model.parameters()))
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad is not None and not param.grad.any() for param in model.parameters())
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


def case_synchronize_twice_reduces_once():
    model = network()
    ((inputs, targets),) = batches(1)
    expected = gradients_by_rank(model, inputs, targets)
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), op=hvd.Sum
    )
    squares(model, share(inputs), share(targets)).backward()
    optimizer.synchronize()
    optimizer.synchronize()
    for param, *parts in zip(model.parameters(), *expected, strict=True):
        torch.testing.assert_close(param.grad, torch.stack(parts).sum(dim=0))


# ---------------------------------------------------------------------------------------------


test_on_ranks = session.on_ranks(globals(), 1, 2, 3, 4, push=[1, 3], session="torch")
