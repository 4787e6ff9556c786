"""Training with DistributedOptimizer on N ranks equals training in one process on all the data."""

from __future__ import annotations

import copy
import functools
import math
import warnings

import pytest
import session
import torch
from torch import nn
from torch_training import (
    Make,
    Twins,
    assert_equal_on_all_ranks,
    batches,
    distributed,
    network,
    plain_sgd,
    sgd,
    share,
    squares,
    start,
)

import hororing.torch as hvd
from hororing._requests.process_sets import ProcessSet, register, unregister


def gradients_by_rank(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> list[list[torch.Tensor]]:
    """Return the gradients of each rank before the reduction."""
    result = []
    for rank in range(hvd.size()):
        twin = copy.deepcopy(model)
        squares(twin, share(inputs, rank), share(targets, rank)).backward()
        result.append([param.grad for param in twin.parameters()])
    return result


def assert_trains_as_alone(make: Make = sgd, **options: object) -> None:
    twins = Twins(make, **options)
    twins.train()
    twins.check()


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
    assert_trains_as_alone(named=False)
    model = network()
    optimizer = hvd.DistributedOptimizer(plain_sgd(model.parameters()))
    another = hvd.DistributedOptimizer(plain_sgd(network().parameters()))
    names = [*optimizer._parameter_names.values(), *another._parameter_names.values()]
    assert len(set(names)) == 12


def case_parameter_groups_keep_their_options():
    def make(params) -> torch.optim.Optimizer:
        slow, fast = (params := list(params))[:3], params[3:]
        return torch.optim.SGD(
            [{"params": slow, "lr": 0.01}, {"params": fast, "momentum": 0.5}], lr=0.1
        )

    assert_trains_as_alone(make)


def case_groups_do_not_change_the_result():
    for groups in (1, 2, 5, 1000):
        assert_trains_as_alone(groups=groups)
    for pick in ([[0, 5], [1, 2]], [(4, 2, 0)], [[index] for index in range(6)]):
        model = network()
        params = list(model.parameters())
        groups = [type(positions)(params[at] for at in positions) for positions in pick]
        assert_trains_as_alone(model=model, groups=groups)


def case_a_group_has_one_order_although_its_gradients_arrive_in_another_on_each_rank():
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(sgd([first, second]), groups=[[first, second]])
    losses = [(first, 1.0), (second, 100.0)]
    for _ in range(2):  # in the first pass, gradients wait for its end
        optimizer.zero_grad()
        # Autograd runs the last operations first.
        parts = [factor * param.sum() for param, factor in losses[:: 1 if hvd.rank() % 2 else -1]]
        (parts[0] + parts[1]).backward()
        optimizer.synchronize()
        for param, factor in losses:
            assert torch.equal(param.grad, torch.full((2,), factor))


def case_num_groups_works_and_warns():
    with pytest.warns(DeprecationWarning, match="num_groups.*use `groups`"):
        assert_trains_as_alone(num_groups=2)
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
        assert_trains_as_alone(gradient_predivide_factor=factor)
        assert_trains_as_alone(gradient_predivide_factor=factor, groups=2)


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
    optimizer = distributed(model, plain_sgd, **options)
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
                    assert torch.equal(mine, mine.to(dtype).double())  # they were compressed
                # There is one rounding before and one after the sum, each by at most half an eps of
                # the largest part (the second one a little more, because the first may raise the
                # value), or by half of the smallest number.
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

    assert_trains_as_alone(compression=Halved)


# ---------------------------------------------------------------------------------------------
# Several backward passes per step


def case_gradients_add_up_over_backward_passes():
    for groups in (None, 2):
        twins = Twins(backward_passes_per_step=3, groups=groups)
        # Fewer passes are valid: step() sends the remaining gradients.
        for told, made in ((3, [3, 3, 2, 3]), (2, [2, 2]), (1, [1]), (4, [4])):
            twins.optimizer.set_backward_passes_per_step(told)
            assert twins.optimizer.backward_passes_per_step == told
            for passes in made:
                twins.train(1, passes)
                twins.check()


def case_one_backward_pass_too_many_is_refused_by_name():
    """With op=Sum it would sum sums. Averages may be averaged again (test_torch_backward.py)."""
    for passes in (1, 2):
        model = network()
        optimizer = distributed(model, backward_passes_per_step=passes, op=hvd.Sum)
        inputs, targets = batches(1)[0]
        for _ in range(passes):
            squares(model, inputs, targets).backward()
        if hvd.size() > 1:
            text = rf"'4\.\w+'.* backward_passes_per_step \({passes}\) .*op=Sum .*\.zero_grad\(\)"
            with pytest.raises(AssertionError, match=text):
                squares(model, inputs, targets).backward()
        optimizer.zero_grad()
        for _ in range(passes):
            squares(model, inputs, targets).backward()
        optimizer.step()
        assert_equal_on_all_ranks(*model.parameters())


def case_zero_grad_between_passes_starts_over():
    model = network()
    optimizer = distributed(model, backward_passes_per_step=2)
    ((inputs, targets),) = batches(1)
    squares(model, inputs, targets).backward()
    optimizer.zero_grad()
    for _ in range(2):
        squares(model, inputs, targets).backward()
    optimizer.step()


# ---------------------------------------------------------------------------------------------
# synchronize, skip_synchronize, zero_grad


def case_gradients_may_be_clipped_between_synchronize_and_step():
    twins = Twins()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches():
            twins.zero_grad()
            twins.backward(*batch)
            twins.optimizer.synchronize()
            mine, theirs = (
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                for model in (twins.model, twins.twin)
            )
            with twins.optimizer.skip_synchronize():
                twins.step()
            assert theirs > 0.05
            assert math.isclose(mine, theirs, rel_tol=1e-12)
    twins.check()


def case_step_after_synchronize_warns_and_does_not_reduce_again():
    twins = Twins(plain_sgd, op=hvd.Sum)
    ((inputs, targets),) = batches(1)
    twins.backward(inputs, targets)
    twins.optimizer.synchronize()
    if hvd.size() > 1:
        # Horovod's text, which scripts filter.
        words = r"optimizer\.step\(\) called without optimizer\.skip_synchronize\(\)"
        with pytest.warns(UserWarning, match=words) as caught:
            twins.optimizer.step()
        assert caught[0].filename == __file__
    else:
        twins.optimizer.step()
    twins.plain.step()
    twins.check()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twins.optimizer.zero_grad()
        squares(twins.model, share(inputs), share(targets)).backward()
        twins.optimizer.step()


def case_skip_synchronize_needs_no_synchronize():
    twins = Twins()
    twins.backward(*batches(1)[0])
    with twins.optimizer.skip_synchronize():
        twins.step()
    twins.check()


def case_zero_grad_after_backward_drops_the_gradients():
    model = network()
    optimizer = distributed(model)
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
    optimizer = distributed(model, op=hvd.Sum)
    squares(model, share(inputs), share(targets)).backward()
    optimizer.synchronize()
    optimizer.synchronize()
    for param, *parts in zip(model.parameters(), *expected, strict=True):
        torch.testing.assert_close(param.grad, torch.stack(parts).sum(dim=0))


# ---------------------------------------------------------------------------------------------
# op=Adasum on other numbers of ranks than in test_torch_adasum_optimizer.py


def case_adasum_on_one_rank_trains_as_without_it():
    if hvd.size() > 1:
        return
    twins = Twins(op=hvd.Adasum)
    twins.train()
    twins.check(0)
    with twins.optimizer.skip_synchronize():
        twins.optimizer.step()


def case_adasum_on_three_ranks_in_process_sets_and_with_predivide_is_refused():
    optimizer = sgd(network().parameters())
    if hvd.size() == 3:
        with pytest.raises(NotImplementedError, match="power of two, not 3"):
            hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
    if hvd.size() > 1:
        others = register(ProcessSet(range(hvd.size() - 1)))
        with pytest.raises(NotImplementedError, match="not in a process set"):
            hvd.DistributedOptimizer(optimizer, op=hvd.Adasum, process_set=others)
        unregister(others)
    with pytest.raises(ValueError, match="op=Average only"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Adasum, gradient_predivide_factor=2.0)
    assert type(optimizer) is torch.optim.SGD


test_on_ranks = session.on_ranks(globals(), 1, 2, 3, 4, push=[1, 3], session="torch")
