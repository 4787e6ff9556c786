"""step_in_forward: who looks at parameters before the forward pass, and what is refused."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import mpirun
import pytest
import torch
from forward_twins import (
    MAKERS,
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

import hororing.torch as hvd

# ---------------------------------------------------------------------------------------------
# Who looks elsewhere finds finished parameters


def case_whoever_looks_elsewhere_finds_finished_parameters():
    start()
    both = pair(plain(), MAKERS["adam"])
    (model, optimizer), (twin, _) = both
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    looks: list[Callable[[], object]] = [
        optimizer.state_dict,
        optimizer.finish_step,
        model.state_dict,
        lambda: model[2].state_dict(),
        lambda: hvd.broadcast_parameters(list(model.named_parameters()), 0),
        lambda: hvd.broadcast_optimizer_state(optimizer, 0),
    ]
    for look in looks:
        train(both, 2)
        assert is_due(optimizer) == (hvd.size() > 1)
        look()
        assert not is_due(optimizer)
        assert_same_bits(both)
    train(both, 1)
    for each in both:
        each[1].synchronize()
    assert_same_bits(both)
    train(both, 2)  # what is due is lost with what it would have changed
    for each in both:
        each[0].load_state_dict(saved[0])
        each[1].load_state_dict(copy.deepcopy(saved[1]))
    assert_same_bits(both)
    assert torch.equal(model[0].weight, saved[0]["0.weight"])
    train(both)
    assert_same_bits(both)
    assert twin is not model


def case_copies_of_the_model_need_a_finished_step():
    both = pair(plain())
    train(both, 2)
    model, optimizer = both[0]
    if hvd.size() > 1:
        with pytest.raises(RuntimeError, match="finish_step"):
            copy.deepcopy(model)
    optimizer.finish_step()
    copied = copy.deepcopy(model)
    with pytest.raises(TypeError, match="make another one"):
        copy.deepcopy(optimizer)
    train(both, 2)
    before = copied[0].weight.clone()
    copied(batch()[0])  # its hooks do nothing
    assert torch.equal(copied[0].weight, before)
    assert_same_bits(both)


def case_an_optimizer_that_nobody_holds_finishes_its_step():
    both = pair(plain())
    train(both, 3)
    model, twin = both[0][0], both[1][0]
    del both
    gc.collect()
    inputs, _ = batch()
    assert torch.equal(model(inputs), twin(inputs))
    gc.collect()


# ---------------------------------------------------------------------------------------------
# What does not work says so


def case_a_weight_that_is_used_outside_its_module_is_an_error():
    if hvd.size() == 1:
        return
    both = pair(plain())
    train(both, 2)
    model, optimizer = both[0]
    inputs, _ = batch()
    loss = nn.functional.linear(inputs, model[0].weight).sum()
    with pytest.raises(AssertionError, match=r"'0\.weight' .*finish_step"):
        loss.backward()
    with pytest.raises(RuntimeError, match="written to"):  # it was added to what was on its way
        optimizer.finish_step()
    optimizer.zero_grad()
    nn.functional.linear(inputs, model[0].weight).sum().backward()
    optimizer.step()
    optimizer.finish_step()


def case_gradients_that_are_written_to_in_flight_are_an_error():
    if hvd.size() == 1:
        return
    both = pair(plain())
    train(both, 2)
    model, optimizer = both[0]
    model.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match=r"'\d\.(weight|bias)'.*optimizer\.zero_grad"):
        model(batch()[0])
    with pytest.raises(RuntimeError, match="zero_grad"):
        optimizer.finish_step()
    assert not is_due(optimizer)


def case_what_cannot_work_is_refused():
    model = plain()

    def make(optimizer: Any = None, **options: Any) -> Any:
        options.setdefault("step_in_forward", model)
        return hvd.DistributedOptimizer(optimizer or MAKERS["sgd"](model.parameters()), **options)

    with pytest.raises(TypeError, match="step_in_forward takes the model"):
        make(step_in_forward=True)
    for options, text in (
        *([] if hvd.size() == 3 else [({"op": hvd.Adasum}, "op=Adasum")]),
        ({"groups": 2}, "groups"),
        ({"num_groups": 1}, "groups"),
        ({"step_in_forward": nn.Linear(2, 2)}, "does not hold 6 of 6 parameters"),
        # On one rank: the compiler is long in coming.
        *(
            [({"step_in_forward": torch.compile(model, backend="eager")}, "compiled")]
            if hvd.rank() == 0
            else []
        ),
        ({"optimizer": torch.optim.LBFGS(model.parameters())}, "LBFGS"),
        ({"optimizer": torch.optim.Adam(model.parameters(), capturable=True)}, "capturable=True"),
    ):
        with pytest.raises(ValueError, match=f"step_in_forward.*{text}"):
            make(**options)
    optimizer = make()
    with pytest.raises(ValueError, match="closure with step_in_forward"):
        optimizer.step(lambda: 0.0)
    scaler = torch.amp.GradScaler("cpu")
    inputs, targets = batch()
    scaler.scale(squares(model, inputs, targets)).backward()
    with pytest.raises(ValueError, match=r"GradScaler.*leave step_in_forward out"):
        scaler.step(optimizer)
    if hvd.size() > 1:
        hook = optimizer.register_step_post_hook(lambda *_: None)
        with pytest.raises(ValueError, match=r"hooks of optimizer\.step"):
            optimizer.step()
        hook.remove()
    optimizer.step()
    optimizer.finish_step()


class Counting(torch.optim.SGD):
    """Keeps something of all parameters in its groups."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step(closure)


def case_an_optimizer_that_counts_its_steps_in_groups_is_refused():
    if hvd.size() == 1:
        return
    (model, optimizer), _ = pair(plain(), lambda params: Counting(params, lr=0.1))
    inputs, targets = batch()
    squares(model, inputs, targets).backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"Counting, whose step\(\) changes count"):
        optimizer.finish_step()
    optimizer._steps.before_forward(optimizer._steps._hooks[model])  # nothing is left


def case_ranks_that_differ_are_an_error_that_the_job_survives():
    if hvd.size() == 1:
        return
    model = nn.Sequential(nn.Linear(5, 3 + (hvd.rank() == 1)), nn.Tanh())
    optimizer = hvd.DistributedOptimizer(
        MAKERS["sgd"](model.parameters()),
        [(f"odd.{name}", param) for name, param in model.named_parameters()],
        step_in_forward=model,
    )
    inputs, _ = batch()
    model(inputs).sum().backward()
    optimizer.step()
    with pytest.raises(hvd.MismatchError, match=r"odd\.0\.weight"):
        model(inputs)
    with pytest.raises(hvd.MismatchError) if is_due(optimizer) else warnings.catch_warnings():
        optimizer.finish_step()
    assert not is_due(optimizer)
    both = pair(plain())
    train(both)
    assert_same_bits(both)


# The last one.
def case_the_step_is_taken_after_shutdown_too():
    both = pair(plain())
    train(both, 3)
    (model, optimizer), (twin, _) = both
    inputs, _ = batch()
    size = hvd.size()
    hvd.barrier()
    hvd.shutdown()
    assert is_due(optimizer) == (size > 1)
    assert torch.equal(model(inputs), twin(inputs))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", mpirun.case_names(globals()))
def test_on_ranks(case: str, size: int):
    mpirun.cases_of(__file__, size).check(case)
