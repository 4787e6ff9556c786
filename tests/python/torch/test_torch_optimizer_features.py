"""DistributedOptimizer with the usual features of scripts: branches, freezing, schedulers, scalers,
closures, checkpoints, copies, sparse gradients, mistakes.

The oracles are those of torch_training.py: every rank computes the results of all ranks.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import session
import torch
from configured import made_at_once
from torch import nn
from torch_training import (
    BATCH,
    Careless,
    Twins,
    Words,
    assert_equal_on_all_ranks,
    assert_same,
    average_gradients,
    backward,
    batches,
    distributed,
    network,
    outputs_squared,
    plain_sgd,
    sgd,
    share,
    squares,
    start,
    train,
    word_batches,
)

import hororing.torch as hvd
from hororing.errors import MismatchError

WAIT_S = 30


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
        self.idle = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](torch.tanh(self.body(inputs)))


# ---------------------------------------------------------------------------------------------
# Which parameters have gradients


def case_start():
    start()


def case_ranks_may_run_different_branches():
    for options in ({}, {"groups": 2}, {"groups": 1}, {"compression": hvd.Compression.none}):
        if hvd.size() == 1:
            break  # a single rank does not create missing gradients
        twins = Twins(functools.partial(sgd, weight_decay=0.1), TwoHeads(), **options)
        for step, (inputs, _) in enumerate(batches()):
            twins.train_by_rank(
                lambda module, rank, step=step, inputs=inputs: (
                    module(share(inputs, rank), (rank + step) % 2).square().mean()
                )
            )
            assert not twins.model.idle.weight.grad.any()
        twins.check()


def case_a_listed_group_waits_for_nobody_who_has_no_gradient():
    if hvd.size() == 1:
        return
    model = TwoHeads()
    first, second = model.heads
    groups = [[first.weight, second.weight], [second.bias, model.body.bias, first.bias]]
    twins = Twins(plain_sgd, model, groups=groups)
    for inputs, _ in batches(3):
        twins.train_by_rank(
            lambda module, rank, inputs=inputs: (
                module(share(inputs, rank), int(rank > 0)).square().mean()
            )
        )
    twins.check()


def case_a_step_without_any_backward_pass_is_harmless():
    model = network()
    before = copy.deepcopy(model)
    optimizer = distributed(model)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert_same(model, before, tolerance=0)


def case_frozen_parameters_may_thaw_and_freeze_again():
    for options in ({}, {"groups": 2}):
        model = network()
        model[0].requires_grad_(False)
        twins = Twins(plain_sgd, model, **options)
        for layer, live in ((0, False), (0, True), (2, False), (2, True)):
            model[layer].requires_grad_(live)
            twins.twin[layer].requires_grad_(live)
            twins.train(2)
            twins.check()
        if hvd.size() > 1 and not options:
            assert all(param._post_accumulate_grad_hooks for param in model.parameters())


def case_all_live_parameters_may_freeze_while_others_thaw():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    optimizer = distributed(model, plain_sgd)
    for turn in range(4):
        model[turn % 2].requires_grad_(False)
        model[1 - turn % 2].requires_grad_(True)
        optimizer.zero_grad()
        (model(torch.ones(1, 3)) * (hvd.rank() + 1)).sum().backward()
        assert_equal_on_all_ranks(*(param.grad for param in model[1 - turn % 2].parameters()))
        optimizer.step()


def case_an_optimizer_without_parameters_may_get_some_later():
    late = nn.Linear(2, 2)
    for named in ([], list(late.named_parameters()), None):
        optimizer = hvd.DistributedOptimizer(plain_sgd([{"params": []}]), named)
        optimizer.add_param_group({"params": late.parameters()})
        (late(torch.ones(1, 2)) * (hvd.rank() + 1)).sum().backward()
        assert_equal_on_all_ranks(late.weight.grad)
        optimizer.step(lambda: late(torch.ones(1, 2)).sum())
        optimizer.zero_grad()


def case_a_step_that_skips_the_reduction_refuses_gradients_of_one_rank():
    if hvd.size() == 1:
        return
    model = network()
    optimizer = distributed(model, backward_passes_per_step=2)
    before = copy.deepcopy(model)
    squares(model, torch.randn(2, 5), torch.randn(2, 3)).backward()
    with (
        pytest.raises(AssertionError, match=r"1 of 2 backward passes; .*synchronize\(\)"),
        optimizer.skip_synchronize(),
    ):
        optimizer.step()
    assert_same(model, before, tolerance=0)
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert_equal_on_all_ranks(*model.parameters())


def case_odd_tensors_are_parameters_too():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.short = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            self.single = nn.Parameter(torch.ones(2, 2, dtype=torch.float32))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            parts = (self.empty.sum(), self.short.sum().double(), self.single.sum().double())
            return self.scalar * inputs.mean() + sum(parts) * inputs.mean()

    for options in ({}, {"groups": 1}):
        model = Odd()
        optimizer = distributed(model, plain_sgd, **options)
        model(torch.full((2,), float(hvd.rank()))).backward()
        optimizer.synchronize()
        mean = (hvd.size() - 1) / 2
        for param in model.parameters():
            assert param.grad.dtype is param.dtype
            torch.testing.assert_close(param.grad, torch.full_like(param, mean))


def case_a_group_may_have_a_parameter_twice():
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of it
            return torch.optim.SGD([model.weight, model.bias, model.weight], lr=0.1)

    for options in ({}, {"groups": 2}, {"backward_passes_per_step": 2}):
        model = nn.Linear(2, 2).double()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        twin = copy.deepcopy(model)
        optimizer = hvd.DistributedOptimizer(optimizer_of(model), **options)
        plain = optimizer_of(twin)
        for used in (True, False):
            optimizer.zero_grad()
            plain.zero_grad(set_to_none=False)
            if used:
                model(torch.full((1, 2), hvd.rank() + 1.0).double()).sum().backward()
                twin(torch.full((1, 2), (hvd.size() + 1) / 2).double()).sum().backward()
            optimizer.step()
            plain.step()
            torch.testing.assert_close(model.weight, twin.weight)


def case_gradients_need_not_have_the_layout_of_their_parameter():
    def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        if model[0].weight.is_contiguous(memory_format=torch.channels_last):
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return outputs_squared(model, inputs)

    inputs = torch.randn(BATCH, 3, 6, 6)
    for options in ({}, {"groups": 2}, {"compression": hvd.Compression.fp16}):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3))
        twins = Twins(plain_sgd, model, loss=loss, **options)
        if hvd.rank() % 2 == 0:
            model.to(memory_format=torch.channels_last)
        twins.train(3, draw=lambda _: [(inputs,)])
        twins.check(1e-3 if "compression" in options else 1e-12)


def case_a_gradient_may_be_a_view_with_holes():
    param = nn.Parameter(torch.zeros(4, 3))
    optimizer = hvd.DistributedOptimizer(plain_sgd([param]), op=hvd.Sum)
    owner = torch.full((3, 8), 7.0)
    param.grad = owner.t()[::2]
    param.grad.fill_(0.0)
    (param.sum() * (hvd.rank() + 1)).backward()
    optimizer.step()
    total = hvd.size() * (hvd.size() + 1) / 2
    assert torch.equal(param.grad, torch.full((4, 3), total))
    assert torch.equal(owner.t()[1::2], torch.full((4, 3), 7.0))  # the rest is unchanged


# ---------------------------------------------------------------------------------------------
# Sparse gradients


def case_sparse_gradients_are_reduced():
    for options in (
        {},
        {"sparse_as_dense": True},
        {"sparse_as_dense": True, "groups": 2},
        {"gradient_predivide_factor": 2.0},
        {"op": hvd.Sum},
        {"backward_passes_per_step": 2},
    ):
        twins = Twins(plain_sgd, Words(), loss=outputs_squared, **options)
        for _ in range(3):
            twins.train(1, options.get("backward_passes_per_step", 1), word_batches)
            assert twins.model.table.weight.grad.is_sparse
            twins.check()


def case_sparse_adam_works():
    twins = Twins(torch.optim.SparseAdam, nn.Embedding(10, 4, sparse=True), loss=outputs_squared)
    twins.train(4, draw=word_batches)
    twins.check()


def case_a_rank_without_a_sparse_gradient_takes_part():
    if hvd.size() == 1:
        return
    for as_dense in (True, False):
        twins = Twins(plain_sgd, Words(), sparse_as_dense=as_dense)
        for step, (words,) in enumerate(word_batches(4)):

            def loss(module, rank, step=step, words=words):
                if rank == 0 and step % 2 == 1:
                    return module.out.weight.square().mean()
                return module(share(words, rank)).square().mean()

            twins.train_by_rank(loss)
            twins.check()


def case_sparse_adam_works_on_a_rank_without_a_gradient():
    def loss(tables, rank: int, step: int) -> torch.Tensor:
        used = tables[:1] if (rank, step) == (0, 1) else tables
        return torch.stack([table(torch.tensor([rank])).square().sum() for table in used]).sum()

    for as_dense in (True, False):
        ours = nn.ModuleList(nn.Embedding(5, 2, sparse=True) for _ in range(2))
        hvd.broadcast_parameters(ours.state_dict(), root_rank=0)
        twin = copy.deepcopy(ours)
        optimizer = distributed(ours, torch.optim.SparseAdam, sparse_as_dense=as_dense)
        plain = torch.optim.SparseAdam(twin.parameters())
        for step in range(3):
            optimizer.zero_grad()
            loss(ours, hvd.rank(), step).backward()
            optimizer.step()
            plain.zero_grad()
            losses = [loss(twin, rank, step) for rank in range(hvd.size())]
            torch.stack(losses).mean().backward()
            plain.step()
        for param, other in zip(ours.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(param, other)


def case_a_rank_that_never_had_a_sparse_gradient_gets_an_error_with_the_others():
    if hvd.size() == 1:
        return
    model = Words()
    optimizer = distributed(model, plain_sgd)
    words = word_batches(1)[0][0]
    loss = model.out.weight.square().mean() if hvd.rank() == 0 else model(words).square().mean()
    with pytest.raises(MismatchError, match=r"table\.weight"):
        loss.backward()
    optimizer.zero_grad()
    model(words).square().mean().backward()
    optimizer.step()


def case_a_sparse_gradient_in_a_group_is_refused():
    if hvd.size() == 1:
        return
    model = Words()
    optimizer = distributed(model, plain_sgd, groups=1)
    with pytest.raises(ValueError, match=r"'table\.weight' is sparse and in a group"):
        outputs_squared(model, *word_batches(1)[0]).backward()
    with pytest.raises(ValueError, match="sparse_as_dense=True"):
        optimizer.step()


# ---------------------------------------------------------------------------------------------
# Several optimizers


def case_two_optimizers_train_two_models():
    models = nn.ModuleList([network(), network()])
    twins = copy.deepcopy(models)
    makes = (sgd, plain_sgd)
    optimizers = [distributed(models[at], makes[at], f"{at}.") for at in range(2)]
    plains = [makes[at](twins[at].parameters()) for at in range(2)]

    def chained(pair: nn.ModuleList, inputs, targets) -> torch.Tensor:
        return sum(squares(model, inputs, targets) for model in pair)

    for inputs, targets in batches():
        for optimizer in (*optimizers, *plains):
            optimizer.zero_grad()
        chained(models, share(inputs), share(targets)).backward()
        chained(twins, inputs, targets).backward()
        for optimizer in (*reversed(optimizers), *plains):
            optimizer.step()
    assert_same(models, twins)


def case_two_optimizers_may_share_a_parameter():
    model = network()
    twin = copy.deepcopy(model)

    def two(module: nn.Module, wrap) -> list[torch.optim.Optimizer]:
        head, tail = [*module[0].parameters()], [*module[2].parameters(), *module[4].parameters()]
        return [wrap(sgd([*head, tail[0]])), wrap(plain_sgd(tail))]

    optimizers = two(
        model, lambda given: hvd.DistributedOptimizer(given, list(model.named_parameters()))
    )
    plains = two(twin, lambda given: given)
    for turn, (inputs, targets) in enumerate(batches()):
        model.zero_grad()
        twin.zero_grad()
        squares(model, share(inputs), share(targets)).backward()
        squares(twin, inputs, targets).backward()
        for index in (turn % 2, 1 - turn % 2):
            optimizers[index].step()
            plains[index].step()
    assert_same(model, twin)


def case_one_model_may_change_its_optimizer():
    twins = Twins()
    for make in (plain_sgd, functools.partial(torch.optim.Adam, lr=0.01)):
        twins.train(3)
        twins.check()
        # The old one is deleted only after the new one is made.
        twins.optimizer = distributed(twins.model, make)
        gc.collect()
        twins.plain = make(twins.twin.parameters())
    twins.train(3)
    twins.check()


def case_an_optimizer_that_is_gone_leaves_nothing_behind():
    model = network()
    optimizer = distributed(model)
    inputs, targets = batches(1)[0]
    squares(model, inputs, targets).backward()  # in flight when the optimizer is deleted
    del optimizer
    gc.collect()
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    model.zero_grad()
    squares(model, inputs, targets).backward()
    hvd.barrier()
    optimizer = distributed(model)
    train(model, optimizer, batches(2))
    assert_equal_on_all_ranks(*model.parameters())


# ---------------------------------------------------------------------------------------------
# What else works on optimizers


def case_it_is_still_an_instance_of_its_class():
    given = sgd(network().parameters())
    optimizer = hvd.DistributedOptimizer(given)
    assert optimizer is given
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert type(optimizer).__doc__ == torch.optim.SGD.__doc__
    assert not isinstance(sgd(network().parameters()), type(optimizer))


def case_a_class_of_the_script_may_have_methods_without_arguments():
    class Plain(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def zero_grad(self):
            for param in self.param_groups[0]["params"]:
                param.grad = None

        def step(self):
            for param in self.param_groups[0]["params"]:
                param.data.sub_(param.grad, alpha=0.1)

    twins = Twins(Plain)
    twins.train(2)
    twins.check()


def case_schedulers_work_and_do_not_warn():
    kinds = torch.optim.lr_scheduler
    makes = (
        lambda optimizer: kinds.StepLR(optimizer, 2, gamma=0.5),
        lambda optimizer: kinds.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: kinds.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    )
    for make, scheduler_first in ((make, first) for make in makes for first in (True, False)):
        model = network()
        twin = copy.deepcopy(model)
        optimizer, plain = sgd(model.parameters()), sgd(twin.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if scheduler_first:
                scheduler = make(optimizer)
            hvd.DistributedOptimizer(optimizer, model.named_parameters())
            if not scheduler_first:
                scheduler = make(optimizer)
            also = kinds.ExponentialLR(optimizer, 0.9)
            schedulers = (scheduler, also, make(plain), kinds.ExponentialLR(plain, 0.9))
            for inputs, targets in batches(4):
                train(model, optimizer, [(inputs, targets)])
                plain.zero_grad()
                squares(twin, inputs, targets).backward()
                plain.step()
                for each in schedulers:
                    each.step()
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        assert_same(model, twin)


def case_a_scheduler_before_the_first_step_still_warns():
    for scheduler_first in (True, False):
        optimizer = sgd(network().parameters())
        if scheduler_first:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        hvd.DistributedOptimizer(optimizer)
        if not scheduler_first:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        with pytest.warns(UserWarning, match="before `optimizer.step"):
            scheduler.step()


def case_step_hooks_see_reduced_gradients():
    model = network()
    optimizer = distributed(model)
    seen: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: seen.append(model[0].weight.grad.clone())
    )
    optimizer.register_step_post_hook(lambda *_: seen.append(model[0].weight.grad.clone()))
    train(model, optimizer, batches(2))
    assert len(seen) == 4
    assert_equal_on_all_ranks(*seen)


def case_a_scaler_makes_all_ranks_skip_the_same_steps():
    for pattern in ("step", "unscale", "synchronize"):
        twins = Twins(model=network().float())
        model, optimizer = twins.model, twins.optimizer
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        scale = 1024.0
        for step, (inputs, targets) in enumerate(batches()):
            inputs, targets = inputs.float(), targets.float()
            overflows = step in (1, 4)
            poison = float("inf") if overflows and hvd.rank() == hvd.size() - 1 else 1.0
            twins.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                loss = squares(model, share(inputs), share(targets))
                scaler.scale(loss * poison).backward()
                if pattern == "synchronize":
                    optimizer.synchronize()
                if pattern != "step":
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                if pattern == "synchronize":
                    with optimizer.skip_synchronize():
                        scaler.step(optimizer)
                else:
                    scaler.step(optimizer)
                scaler.update()
            squares(twins.twin, inputs, targets).backward()
            if overflows:
                scale /= 2
            else:
                if pattern != "step":
                    nn.utils.clip_grad_norm_(twins.twin.parameters(), 0.05)
                twins.plain.step()
            assert scaler.get_scale() == scale
            twins.check(2e-6)  # float32


def case_a_scaler_that_is_off_changes_nothing():
    twins = Twins()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for inputs, targets in batches(3):
        twins.zero_grad()
        scaler.scale(squares(twins.model, share(inputs), share(targets))).backward()
        scaler.step(twins.optimizer)
        scaler.update()
        squares(twins.twin, inputs, targets).backward()
        twins.plain.step()
    twins.check()


def case_scalers_of_other_optimizers_are_left_alone():
    model = network()
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 5)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def closure_of(
    module: nn.Module, optimizer: torch.optim.Optimizer, inputs, targets, calls: list, plain: bool
) -> Callable[[], float | torch.Tensor]:
    def closure() -> float | torch.Tensor:
        calls.append(module)
        optimizer.zero_grad()
        loss = squares(module, inputs, targets)
        loss.backward()
        return loss.item() if plain else loss

    return closure


def case_a_closure_is_called_as_often_as_in_one_process():
    for make in (
        functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=8, line_search_fn="strong_wolfe"),
        functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=4),
        sgd,
    ):
        twins = Twins(make)
        model, twin = twins.model, twins.twin
        calls: list[nn.Module] = []
        for number, (inputs, targets) in enumerate(batches(3)):
            mine = closure_of(
                model, twins.optimizer, share(inputs), share(targets), calls, plain=number > 0
            )
            theirs = closure_of(twin, twins.plain, inputs, targets, calls, plain=False)
            losses = [
                torch.as_tensor(twins.optimizer.step(mine)).detach(),
                twins.plain.step(theirs).detach(),
            ]
            torch.testing.assert_close(*losses, rtol=1e-9, atol=0)
        assert calls.count(model) == calls.count(twin)
        twins.check(1e-8)  # L-BFGS divides by differences


def case_what_a_closure_reduces_needs_no_negotiation():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(sgd([parameter]), [("at once", parameter)])
    # Its two sums: whether ranks have gradients, and the loss.
    assert hvd.size() == 1 or made_at_once(lambda: optimizer.step(lambda: 1.0))


def case_a_closure_without_backward_does_not_reduce_again():
    twins = Twins(op=hvd.Sum)
    for turn, (inputs, targets) in enumerate(batches(4)):
        twins.zero_grad()
        loss = squares(twins.model, share(inputs), share(targets))
        loss.backward()
        if turn % 2 == 1:
            twins.optimizer.synchronize()
        twins.optimizer.step(lambda loss=loss: loss)
        (hvd.size() * squares(twins.twin, inputs, targets)).backward()
        twins.plain.step()
    twins.check()


def case_closures_may_have_no_gradient_on_some_ranks():
    """backward() may be in the closure or before it."""
    if hvd.size() == 1:
        return
    for inside in (True, False):
        twins = Twins()
        for inputs, targets in batches(3):

            def loss_of(module, rank, inputs=inputs, targets=targets, idle=int(inside)):
                if rank == idle:
                    return torch.zeros(())
                return squares(module, share(inputs, rank), share(targets, rank))

            def closure(twins=twins, loss_of=loss_of):
                twins.optimizer.zero_grad()
                loss = loss_of(twins.model, hvd.rank())
                backward(loss)
                return loss

            loss = None if inside else closure()
            twins.optimizer.step(closure if inside else lambda loss=loss: loss)
            average_gradients(twins.twin, loss_of)
            twins.plain.step()
        twins.check()


# ---------------------------------------------------------------------------------------------
# Checkpoints, copies, more parameters


def trained(**options) -> Twins:
    twins = Twins(**options)
    twins.train(2)
    return twins


def case_state_survives_a_checkpoint():
    for options in ({}, {"groups": 2}):
        twins = trained(**options)
        model, optimizer = twins.model, twins.optimizer
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        train(model, optimizer, batches(3))  # diverge, then load the checkpoint
        plains = twins.twin, twins.plain
        for fresh in (False, True):
            checkpoint = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            if fresh:
                twins.model = network()
                make = functools.partial(sgd, lr=9.0)
                twins.optimizer = distributed(twins.model, make, **options)
            twins.model.load_state_dict(checkpoint["model"])
            twins.optimizer.load_state_dict(checkpoint["optimizer"])
            twins.twin, twins.plain = copy.deepcopy(plains)
            twins.train(3)
            twins.check()


def case_elastic_states_send_extra_state_also_if_it_is_a_tensor():
    class Counting(nn.Linear):
        seen = torch.zeros(1)

        def get_extra_state(self):
            return self.seen.clone()

        def set_extra_state(self, state):
            self.seen = state

    model = Counting(2, 2)
    model.seen = torch.full((1,), 5.0 + hvd.rank())
    hvd.elastic.TorchState(model=model).sync()
    assert model.seen.item() == 5.0
    assert_equal_on_all_ranks(*model.parameters())


def case_a_checkpoint_of_a_plain_optimizer_fits():
    twins = trained()
    assert twins.optimizer.state_dict().keys() == twins.plain.state_dict().keys()
    # load_state_dict does not copy tensors.
    twins.optimizer.load_state_dict(copy.deepcopy(twins.plain.state_dict()))
    twins.plain.load_state_dict(copy.deepcopy(twins.optimizer.state_dict()))
    twins.train(2)
    twins.check()


def case_loading_keeps_what_was_set_since():
    twins = trained(backward_passes_per_step=1)
    optimizer = twins.optimizer
    optimizer.set_backward_passes_per_step(2)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.backward_passes_per_step == 2
    twins.train(1, passes=2)
    twins.check()


def case_loading_keeps_the_names_of_parameters_that_are_added_later():
    if hvd.size() == 1:
        return
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model[4].parameters()), model.named_parameters())
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": model[0].parameters()})
    names = [optimizer._parameter_names[param] for param in model[0].parameters()]
    assert names == ["0.weight", "0.bias"]
    squares(model[0], torch.ones(2, 5), torch.ones(2, 7)).backward()
    optimizer.step()


def case_loading_forgets_passes():
    twins = trained(backward_passes_per_step=2)
    squares(twins.model, *batches(1)[0]).backward()
    twins.optimizer.load_state_dict(twins.optimizer.state_dict())
    twins.train(2)
    twins.check()


def case_a_deep_copy_is_distributed_too():
    twins = trained()
    copied = copy.deepcopy(twins)
    assert copied.optimizer.param_groups[0]["params"][0] is copied.model[0].weight
    assert isinstance(copied.optimizer, torch.optim.SGD)
    for each in (copied, twins):
        each.train(2)
    for each in (copied, twins):
        each.check()


def case_added_parameters_are_reduced():
    for named in (True, False):
        twins = Twins(lambda params: sgd([*params][:2]), named=named)
        for layer in (2, 4):
            for model, each in ((twins.model, twins.optimizer), (twins.twin, twins.plain)):
                each.add_param_group({"params": model[layer].parameters(), "lr": 0.01})
            twins.train(2)
            twins.check()
            # Checkpoints and copies include the new parameters.
            twins.optimizer.load_state_dict(copy.deepcopy(twins.optimizer.state_dict()))
            twins = copy.deepcopy(twins)
        twins.train(2)
        twins.check()


def case_parameters_may_leave_an_optimizer_or_move_to_another():
    for options in ({}, {"groups": 1}, {"backward_passes_per_step": 2}):
        model = network()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        first, second, third = (list(layer.parameters()) for layer in model[::2])
        older, newer = (
            hvd.DistributedOptimizer(
                torch.optim.SGD(params, lr=0.01),
                [(f"{name}.{each}", param) for each, param in model.named_parameters()],
                **options,
            )
            for name, params in (("older", first), ("newer", second + third))
        )
        inputs = torch.ones(2, 5)
        for step in range(6):
            if step == 2:
                newer.param_groups[0]["params"] = third
                older.add_param_group({"params": second})
            if step == 4:
                del older.param_groups[0]  # nobody's now
                newer.add_param_group({"params": older.param_groups.pop()["params"]})
                older.add_param_group({"params": third})
                del newer.param_groups[0]
            for _ in range(options.get("backward_passes_per_step", 1)):
                outputs_squared(model, inputs + hvd.rank()).backward()
            reduced = second + third if step > 3 else first + second + third
            assert_equal_on_all_ranks(*(param.grad for param in reduced))
            older.step()
            newer.step()
            model.zero_grad()
        assert_equal_on_all_ranks(*model.parameters())
        assert older._groups is None
        left = [id(param) for group in newer._groups or [] for param in group]
        assert left == ([id(param) for param in second] if "groups" in options else [])
        model, newer = copy.deepcopy((model, newer))
        for _ in range(options.get("backward_passes_per_step", 1)):
            outputs_squared(model, inputs + hvd.rank()).backward()
        assert_equal_on_all_ranks(*(param.grad for param in model[2].parameters()))


# ---------------------------------------------------------------------------------------------
# Sent while backward runs; errors


def wait_until_equal(tensor: torch.Tensor, value: float) -> None:
    deadline = time.monotonic() + WAIT_S
    while not bool((tensor == value).all()):
        assert time.monotonic() < deadline, f"got {tensor}, not {value}"


def case_the_last_layer_is_reduced_before_backward_ends():
    if hvd.size() == 1:
        return
    for options in ({}, {"groups": 3}):
        model = network()
        optimizer = distributed(model, plain_sgd, op=hvd.Sum, **options)
        # In the first pass, gradients wait for its end, because they may come more than once.
        model(torch.ones(4, 5)).sum().backward()
        optimizer.zero_grad()
        hidden = model[1](model[0](torch.ones(4, 5)))
        seen = []

        def wait(_: torch.Tensor, model=model, seen=seen) -> None:
            # Autograd has finished the last two layers here, but not the first.
            assert model[0].weight.grad is None
            wait_until_equal(model[4].bias.grad, 4.0 * sum(range(hvd.size() + 1)))
            seen.append(model[4].bias.grad.clone())

        hidden.register_hook(wait)
        (model[2:](hidden).sum() * (hvd.rank() + 1)).backward()
        optimizer.step()
        assert torch.equal(seen[0], model[4].bias.grad)


def case_parameters_may_get_other_shapes_also_while_the_timeline_runs():
    param = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("grows", param)])
    with tempfile.TemporaryDirectory() as folder:
        for traced in (False, True):
            if traced:
                hvd.start_timeline(Path(folder, f"{hvd.rank()}.json"))
            for length in (4, 3):
                param.data, param.grad = torch.zeros(length), None
                (param * (1.0 + hvd.rank())).sum().backward()
                optimizer.step()
                assert param.tolist() == [-(1 + hvd.size()) / 2] * length, (traced, length)
        hvd.stop_timeline()
        hvd.barrier()


def case_a_mismatch_is_raised_on_every_rank_and_the_next_step_works():
    if hvd.size() == 1:
        return
    for options in ({}, {"groups": 2}):
        twins = Twins(compression=Careless, **options)
        for step, (inputs, targets) in enumerate(batches(4)):
            if step % 2 == 1:
                twins.optimizer.zero_grad()
                with Careless.on(0), pytest.raises(MismatchError, match=r"2\.weight"):
                    squares(twins.model, share(inputs), share(targets)).backward()
            else:
                twins.train(1)
            twins.check()  # a failed step has no effect


def case_ranks_that_ask_for_different_operations_hear_of_it():
    if hvd.size() == 1:
        return
    model = network()
    optimizer = distributed(model, op=hvd.Sum if hvd.rank() == 0 else hvd.Average)
    with pytest.raises(MismatchError, match=r"(?s)'\d\.\w+'.*rank"):
        squares(model, *batches(1)[0]).backward()
    del optimizer
    gc.collect()
    model.zero_grad()
    optimizer = distributed(model)
    train(model, optimizer, batches(2))
    assert_equal_on_all_ranks(*model.parameters())


def case_bad_arguments_are_refused_before_anything_is_changed():
    model = network()
    params, named = list(model.parameters()), list(model.named_parameters())
    bad: list[tuple[dict, type[Exception], str]] = [
        (
            {"named_parameters": [*named[:5], ("0.weight", params[5])]},
            ValueError,
            "'0.weight' more",
        ),
        ({"named_parameters": named[:4]}, ValueError, r"lacks 2 .* \[4, 5\]"),
        ({"named_parameters": []}, ValueError, "lacks 6"),
        ({"named_parameters": params}, ValueError, r"\(name, parameter\) pairs"),
        ({"named_parameters": dict(named)}, ValueError, "pairs"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, ValueError, "op=Average only"),
        ({"named_parameters": 3}, ValueError, "pairs"),
        ({"gradient_predivide_factor": 0.0}, ValueError, "must be positive"),
        ({"gradient_predivide_factor": float("inf")}, ValueError, "must be positive and finite"),
        ({"gradient_predivide_factor": "2"}, TypeError, "predivide_factor must be a number"),
        ({"groups": 2.5}, ValueError, "groups=2.5 must be a positive number"),
        ({"num_groups": 2.5}, ValueError, "groups=2.5 must be a positive number"),
        ({"op": 17}, ValueError, "17"),
        ({"backward_passes_per_step": 0}, ValueError, "at least 1"),
        ({"groups": 0}, ValueError, "positive number"),
        ({"groups": -1}, ValueError, "positive number"),
        ({"groups": True}, ValueError, "groups=True must be a number"),
        ({"groups": {}}, ValueError, "lists of parameters"),
        ({"sparse_as_dense": "no"}, TypeError, "sparse_as_dense must be True or False, not 'no'"),
        ({"groups": [params[0]]}, ValueError, "lists of parameters"),
        ({"groups": [[]]}, ValueError, "non-empty"),
        ({"groups": [["0.weight"]]}, ValueError, "holds a str"),
        ({"groups": [params[:2], params[1:]]}, ValueError, "twice"),
        ({"groups": [[nn.Parameter(torch.ones(1))]]}, ValueError, "does not have"),
    ]
    for arguments, kind, text in bad:
        optimizer = sgd(params)
        with pytest.raises(kind, match=text):
            hvd.DistributedOptimizer(optimizer, **arguments)
        assert type(optimizer) is torch.optim.SGD
        assert not any(param._post_accumulate_grad_hooks for param in params)
    with pytest.raises(TypeError, match="not Linear"):
        hvd.DistributedOptimizer(model[0])
    lazy = nn.LazyLinear(2, bias=False)
    for names in (None, lazy.named_parameters()):
        with pytest.raises(ValueError, match=r"\[0\] have no shape yet.*run the model"):
            hvd.DistributedOptimizer(torch.optim.SGD(lazy.parameters()), names)
    counted = hvd.DistributedOptimizer(sgd(params), groups=torch.tensor(2))
    assert len(counted._groups or []) == 2
    del counted
    gc.collect()
    optimizer = hvd.DistributedOptimizer(sgd(params), named)
    with pytest.raises(ValueError, match="wrap it once"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="passes_per_step=0"):
        optimizer.set_backward_passes_per_step(0)


# ---------------------------------------------------------------------------------------------


test_on_ranks = session.on_ranks(globals(), 1, 2, 3, 4, session="torch")


def test_a_distributed_optimizer_needs_init():
    hvd.shutdown()  # in case another test has left an engine
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
