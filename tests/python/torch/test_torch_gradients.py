"""Gradients in flight: what scripts do with them, and many small ones, which are sent in batches.

The oracle is a twin of the model, which every rank trains with all the data.
"""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import pytest
import session
import torch
from torch import nn
from torch_training import assert_same, batches, sgd, share, squares, start

import hororing.torch as hvd
from hororing.errors import DuplicateNameError

WIDE = 66  # a matrix of 33 KiB, above the limit of the short cut


def case_start() -> None:
    start()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Tanh(),
                         nn.Linear(WIDE, 3))  # fmt: skip


def distributed(model: nn.Module, **options: Any) -> Any:
    return hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **options)


def twins(**options: Any) -> tuple[nn.Module, Any, nn.Module, Any]:
    model = network()
    twin = copy.deepcopy(model)
    return model, distributed(model, **options), twin, sgd(twin.parameters())


# ---------------------------------------------------------------------------------------------
# What scripts do with gradients


def case_every_float_type_is_reduced_in_place():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        param = nn.Parameter(torch.zeros(40000, dtype=dtype))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), op=hvd.Sum)
        (param * (hvd.rank() + 1.0)).sum().backward()
        grad = param.grad
        optimizer.step()
        assert param.grad is grad
        assert torch.equal(grad, torch.full_like(param, sum(range(hvd.size() + 1))))
        del optimizer, param


def case_gradients_that_are_not_reset_add_up():
    model, optimizer, twin, plain = twins(op=hvd.Sum)
    total: list[torch.Tensor] = []
    for inputs, targets in batches(3):
        # Every rank has the previous sum, which is summed again.
        (squares(model, share(inputs), share(targets)) / hvd.size()).backward()
        optimizer.step()
        plain.zero_grad()
        squares(twin, inputs, targets).backward()
        new = [p.grad.clone() for p in twin.parameters()]
        total = [old * hvd.size() + grad for old, grad in zip(total or [0] * 6, new, strict=True)]
        for param, grad in zip(twin.parameters(), total, strict=True):
            param.grad.copy_(grad)
        plain.step()
        assert_same(model, twin)


def case_a_gradient_that_the_user_puts_in_its_place_is_what_the_step_takes():
    model, optimizer, twin, _ = twins(op=hvd.Sum)
    inputs, targets = batches(1)[0]
    for _ in range(2):
        squares(model, share(inputs), share(targets)).backward()
        optimizer.synchronize()
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
    for mine, before in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, before - 0.05 * (1 + 1.9))


def case_an_expanded_gradient_gets_memory_of_its_own():
    for options in ({}, {"groups": 1}):
        param = nn.Parameter(torch.zeros(3, 4))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), **options)
        if hvd.rank() == 0:
            param.grad = torch.tensor(float(hvd.size())).expand(3, 4)
        optimizer.step()
        assert torch.equal(param, torch.full((3, 4), -1.0))


def case_a_rank_without_a_gradient_sends_zeros_of_the_declared_type():
    param = nn.Parameter(torch.zeros(3))
    if not hasattr(param, "grad_dtype"):
        return
    param.grad_dtype = torch.bfloat16
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
    if hvd.rank() == 0:
        (param * hvd.size()).sum().backward()
    optimizer.synchronize()
    assert torch.equal(param.grad, torch.ones(3, dtype=torch.bfloat16))


def case_hooks_of_the_script_come_before_the_reduction():
    layer = nn.Linear(300, 300, bias=False)  # so large that its own hook would send it
    optimizer = distributed(layer)
    in_flight = []

    def double(param):
        in_flight.append(len(optimizer._handles))
        param.grad.mul_(2)

    layer.weight.register_post_accumulate_grad_hook(double)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.ones(1, 300)).sum().backward()
        assert bool((layer.weight.grad == 2).all())
        optimizer.step()
    assert in_flight == [0, 0, 0]


def case_memory_of_the_user_in_which_gradients_add_up_stays_the_gradient():
    model, optimizer, *_ = twins(op=hvd.Sum)
    flat = torch.zeros(WIDE * WIDE)
    own = torch.zeros(WIDE)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        model[2].weight.grad = flat.view(WIDE, WIDE)
        model[2].bias.grad = own
        flat.zero_()
        own.zero_()
        (model[2].weight.sum() * (step + 1.0) + model[2].bias.sum()).backward()
        optimizer.step()
        assert bool((flat == (step + 1.0) * hvd.size()).all())
        assert model[2].weight.grad.data_ptr() == flat.data_ptr()
        assert model[2].bias.grad is own
        assert bool((own == hvd.size()).all())


def case_gradients_of_another_kind_than_declared_are_reduced():
    embedding = nn.Embedding(600, 10, sparse=True)
    optimizer = distributed(embedding, op=hvd.Sum)
    rows = torch.tensor([hvd.rank(), 7])
    embedding(rows).sum().backward()
    optimizer.step()
    assert embedding.weight.grad.is_sparse
    assert float(embedding.weight.grad.to_dense()[7, 0]) == hvd.size()

    model, optimizer, *_ = twins(op=hvd.Sum)
    param = model[2].weight
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (param.pow(2).sum()).backward(create_graph=True)
    optimizer.synchronize()
    assert param.grad.requires_grad
    assert param.grad.grad_fn is not None
    torch.testing.assert_close(param.grad.detach(), 2 * hvd.size() * param.detach())
    for each in model.parameters():
        each.grad = None

    last = nn.Conv2d(8, 8, 9).to(memory_format=torch.channels_last)
    optimizer = distributed(last, op=hvd.Sum)
    last.weight.sum().backward()
    optimizer.step()
    assert bool((last.weight.grad == hvd.size()).all())

    half = network()
    optimizer = distributed(half, op=hvd.Sum)
    half.float()
    half[2].weight.sum().backward()
    optimizer.step()
    assert bool((half[2].weight.grad == hvd.size()).all())
    assert half[2].weight.grad.dtype is torch.float32


def case_forked_workers_leave_gradients_alone():
    model, optimizer, *_ = twins(op=hvd.Sum)
    param = model[2].weight
    param.sum().backward()
    optimizer.step()

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            for each in model.parameters():
                each.grad = None  # the worker's copy
            return torch.tensor(index)

    loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork")
    assert sorted(int(item) for item in loader) == [0, 1, 2, 3]
    assert bool((param.grad == hvd.size()).all())
    optimizer.zero_grad()
    (param.sum() * 3).backward()
    optimizer.step()
    assert bool((param.grad == 3 * hvd.size()).all())


# ---------------------------------------------------------------------------------------------
# Small gradients are submitted in batches


class Scales(nn.Module):
    """A model with many small parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList(torch.ones(3) for _ in range(count))


def case_all_gradients_are_reduced_when_backward_ends():
    if hvd.size() == 1:
        return
    for count in (1, 2, 3, 7, 500):
        model = Scales(count)
        optimizer = distributed(model, op=hvd.Sum)
        for _ in range(2):
            # Each rank has its own branch.
            used = [p for n, p in enumerate(model.factors) if n % hvd.size() != hvd.rank()]
            if used:
                sum(p.sum() * (hvd.rank() + 1.0) for p in used).backward()
            else:
                optimizer.synchronize()
            for number, param in enumerate(model.factors):
                total = sum(r + 1.0 for r in range(hvd.size()) if number % hvd.size() != r)
                assert torch.equal(param.grad, torch.full((3,), total)), number
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()


def case_ranks_may_step_two_optimizers_in_different_order():
    models = [Scales(5), Scales(6)]
    optimizers = [
        hvd.DistributedOptimizer(
            sgd(model.parameters()), [(f"m{n}.{x}", p) for x, p in model.named_parameters()]
        )
        for n, model in enumerate(models)
    ]
    for _ in range(3):
        # One parameter of each model gets no gradient, so batches stay incomplete.
        sum(p.sum() for model in models for p in model.factors[:-1]).backward()
        for optimizer in optimizers if hvd.rank() % 2 else reversed(optimizers):
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def case_a_refused_gradient_is_named_and_the_others_are_sent():
    if hvd.size() == 1:
        return
    model = Scales(40)
    optimizer = distributed(model, op=hvd.Sum)

    def occupy() -> int:
        return hvd.allreduce_async(torch.zeros(3), name="factors.13", op=hvd.Sum)

    def backward() -> None:
        sum(p.sum() for p in model.factors).backward()

    backward()  # the first pass sends at its end, later ones in hooks
    optimizer.zero_grad()
    if hvd.rank() == 0:
        occupied = occupy()
        with pytest.raises(DuplicateNameError, match=r"'factors\.13'.*in the hook.*factors\.13"):
            backward()
        there = [number for number, p in enumerate(model.factors) if p.grad is not None]
        sent = {id(param) for param in optimizer._handles}
        assert [number for number in there if id(model.factors[number]) not in sent] == [13]
    hvd.barrier()
    if hvd.rank() != 0:
        occupied = occupy()
    hvd.synchronize(occupied)
    if hvd.rank() != 0:
        backward()
        there = []
    else:
        with pytest.raises(AssertionError, match=r"gradients, .*optimizer\.synchronize\(\)"):
            optimizer.zero_grad()
    optimizer.step()
    there = hvd.broadcast_object(there)
    for number, param in enumerate(model.factors):
        total = hvd.size() - (number not in there)
        assert torch.equal(param.grad, torch.full((3,), float(total)))


def case_hooks_of_several_threads_lose_nothing():
    model = Scales(300)
    optimizer = distributed(model, op=hvd.Sum, backward_passes_per_step=3)
    for _ in range(3):
        parts = [sum(p.sum() for p in model.factors[n::3]) for n in range(3)]
        threads = [threading.Thread(target=part.backward) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(p.grad, torch.full((3,), float(hvd.size()))) for p in model.factors)
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------------------------------------
# Last: another engine


def case_training_goes_on_with_another_engine():
    model, optimizer, twin, plain = twins()

    def train() -> None:
        for inputs, targets in batches(2):
            optimizer.zero_grad()
            plain.zero_grad()
            squares(model, share(inputs), share(targets)).backward()
            squares(twin, inputs, targets).backward()
            optimizer.step()
            plain.step()
        assert_same(model, twin)

    train()
    kept = [param.grad for param in model.parameters()]
    values = [grad.clone() for grad in kept]
    hvd.shutdown()
    hvd.init()
    train()
    assert all(map(torch.equal, kept, values))
    hvd.shutdown()


test_on_ranks = session.on_ranks(globals(), 1, 2, 3, 4, session="torch")
