"""step_in_forward: updates inside the next forward pass have the bits of the ordinary optimizer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import mpirun
import pytest
import torch
from forward_twins import (
    MAKERS,
    Peculiar,
    assert_same_bits,
    batch,
    is_due,
    pair,
    plain,
    squares,
    start,
    train,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import hororing.torch as hvd

# ---------------------------------------------------------------------------------------------
# The same bits


def case_all_optimizers_have_the_same_bits_under_a_schedule_and_evaluations_in_between():
    start()
    for make in MAKERS.values():
        both = pair(Peculiar(), make)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(each[1], 0.5) for each in both]
        for step in range(7):
            inputs, targets = batch()
            outputs = []
            for (model, optimizer), schedule in zip(both, schedules, strict=True):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs, step), targets).backward()
                optimizer.step()
                schedule.step()
                if step % 2 == 0:
                    model.eval()
                    with torch.no_grad() if step % 4 == 0 else torch.inference_mode():
                        outputs.append(model(inputs))
                    model.train()
            assert not outputs or torch.equal(*outputs)
        assert is_due(both[0][1]) == (hvd.size() > 1 and step % 2 == 1)
        assert_same_bits(both)


def case_groups_of_parameters_keep_their_options():
    def make(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        params = list(params)
        return torch.optim.SGD(
            [{"params": params[1::2], "lr": 0.1}, {"params": params[::2], "weight_decay": 0.1}],
            lr=0.02,
        )

    both = pair(plain(), make)
    train(both, 3)
    for _, optimizer in both:
        optimizer.param_groups[0]["lr"] = 7.0  # of the next step
    assert_same_bits(both)


def case_however_gradients_are_reset():
    def each_to_none(model: nn.Module, _: Any) -> None:
        for param in model.parameters():
            param.grad = None

    ways: list[Callable[[Any, Any], None]] = [
        lambda _, optimizer: optimizer.zero_grad(),
        lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, _: model.zero_grad(),
        each_to_none,
        lambda *_: None,  # they add up
    ]
    for reset in ways:
        both = pair(Peculiar(), MAKERS["adam"])
        for step in range(4):
            inputs, targets = batch()
            for model, optimizer in both:
                nn.functional.mse_loss(model(inputs, step), targets).backward()
                optimizer.step()
                reset(model, optimizer)
        assert_same_bits(both)
    both = pair(plain())
    for _ in range(3):
        inputs, targets = batch()
        for model, optimizer in both:
            squares(model, inputs, targets).backward()
            optimizer.step()
            loss = squares(model, inputs, targets)  # when every update has been applied
            optimizer.zero_grad(set_to_none=False)
            del loss
    assert_same_bits(both)


def case_options_of_the_ordinary_optimizer():
    for options in (
        {"compression": hvd.Compression.fp16},
        {"op": hvd.Sum, "gradient_predivide_factor": 1.0},
        {"gradient_predivide_factor": 2.0},
        {"gradient_as_bucket_view": True},
    ):
        both = pair(plain(), MAKERS["adam"], **options)
        train(both)
        assert_same_bits(both)
    both = pair(plain(), backward_passes_per_step=3)
    for _ in range(3):
        for _, optimizer in both:
            optimizer.zero_grad()
        for _ in range(3):
            inputs, targets = batch()
            for model, _ in both:
                squares(model, inputs, targets).backward()
        for _, optimizer in both:
            optimizer.step()
    assert_same_bits(both)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 5, sparse=True)
        self.rest = plain()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.rest(self.table((inputs.abs().sum(1) * 7).long() % 9) + inputs)


def case_sparse_gradients():
    for as_dense in (False, True):
        both = pair(
            Words(), lambda params: torch.optim.SGD(params, lr=0.1), sparse_as_dense=as_dense
        )
        train(both)
        for _, optimizer in both:
            optimizer.synchronize()
            optimizer.zero_grad()
        assert_same_bits(both)


def case_a_process_set():
    if hvd.size() < 3:
        return
    members = hvd.add_process_set([0, 2])
    both = pair(plain(), process_set=members)
    train(both)
    assert_same_bits(both)
    hvd.remove_process_set(members)


def case_recomputed_activations_and_autocast():
    def recomputed(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = model[0](inputs)
        x = checkpoint(lambda y: model[2](torch.tanh(y)), x, use_reentrant=False)
        return nn.functional.mse_loss(model[4](torch.tanh(x)), targets)

    def mixed(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return squares(model, inputs, targets)

    for loss in (recomputed, mixed):
        both = pair(plain(), MAKERS["adam"])
        train(both, loss=loss)
        assert_same_bits(both)


def case_gradients_may_be_clipped_and_then_the_step_is_taken_at_once():
    both = pair(plain())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            inputs, targets = batch()
            for model, optimizer in both:
                optimizer.zero_grad()
                squares(model, inputs, targets).backward()
                if step % 2 == 1:
                    optimizer.step()
                    continue
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                with optimizer.skip_synchronize():
                    optimizer.step()
                assert not is_due(optimizer)
    assert_same_bits(both)


def case_parameters_that_come_later():
    both = pair(plain())
    train(both, 2)
    torch.manual_seed(mpirun.seed())
    more = nn.Linear(3, 3)
    for model, optimizer in both:
        model.append(copy.deepcopy(more))
        optimizer.add_param_group({"params": list(model[5].parameters()), "lr": 0.3})
    train(both)
    if hvd.size() > 1:
        optimizer = both[0][1]
        with pytest.raises(ValueError, match="does not hold 1 of 1"):
            optimizer.add_param_group({"params": nn.Parameter(torch.ones(2))})
    assert_same_bits(both)


def case_a_parameter_of_two_optimizers_is_updated_at_once():
    model = plain()
    twin = copy.deepcopy(model)
    for each, extra in ((model, {"step_in_forward": model}), (twin, {})):
        # Prefixes: names are the oracle's business.
        names = [(f"{id(extra) and bool(extra)}.{n}", p) for n, p in each.named_parameters()]
        one, two = (
            hvd.DistributedOptimizer(MAKERS["sgd"](each.parameters()), [
                (f"{number}.{name}", param) for name, param in names
            ], **extra)
            for number in range(2)
        )  # fmt: skip
        torch.manual_seed(mpirun.seed() + 1)
        for _ in range(3):
            inputs, targets = batch()
            for optimizer in (one, two):
                optimizer.zero_grad()
                squares(each, inputs, targets).backward()
                optimizer.step()
                assert not extra or not is_due(optimizer)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


# ---------------------------------------------------------------------------------------------
# When


def case_each_parameter_is_updated_when_its_module_begins_and_not_before():
    if hvd.size() == 1:
        return
    both = pair(plain())
    train(both, 2)
    model, optimizer = both[0]
    due = []
    for module in model:
        module.register_forward_pre_hook(
            lambda *_: due.append([optimizer._steps.is_due(p) for p in model.parameters()])
        )
    model(batch()[0])
    assert [each.count(True) for each in due] == [4, 4, 2, 2, 0]
    assert not is_due(optimizer)


def case_priorities_are_the_order_of_use():
    if hvd.size() == 1:
        return
    both = pair(Peculiar())
    model, optimizer = both[0]

    def priority(param: torch.Tensor) -> int:
        return optimizer._reducer.slot(param).prepared.request.priority

    assert priority(model.last.weight) > priority(model.first.weight)  # as registered
    train(both, 1, lambda m, x, y: nn.functional.mse_loss(m(x), y))
    order = [model.scale, model.first.weight, model.twice.weight, model.frozen.weight,
             model.norm.weight, model.attention.in_proj_weight, model.last.weight]  # fmt: skip
    assert [priority(param) for param in order] == sorted(map(priority, order), reverse=True)
    assert len(set(map(priority, order))) == len(order)
    assert priority(model.attention.out_proj.weight) == priority(model.attention.in_proj_weight)
    assert priority(model.never.weight) == priority(model.scale)  # with the module around it
    assert all(priority(param) < 0 for param in model.parameters())
    train(both, 2)
    before = hvd.statistics()["cache_misses"]
    train(both, 3)
    assert hvd.statistics()["cache_misses"] == before
    assert_same_bits(both)


def case_a_model_that_is_compiled_later():
    both = pair(plain())
    compiled = [torch.compile(model, backend="eager") for model, _ in both]
    for _ in range(4):
        inputs, targets = batch()
        for model, (_, optimizer) in zip(compiled, both, strict=True):
            optimizer.zero_grad()
            squares(model, inputs, targets).backward()
            optimizer.step()
    assert_same_bits(both)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", mpirun.case_names(globals()))
def test_on_ranks(case: str, size: int):
    mpirun.cases_of(__file__, size).check(case)
