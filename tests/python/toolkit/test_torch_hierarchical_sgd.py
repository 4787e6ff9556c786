"""HierarchicalSGD for torch against a NumPy oracle, and its invariants."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable

import mpirun
import numpy as np
import pytest
import session
import torch
from hierarchical_oracle import (
    INPUTS,
    OUTPUTS,
    Oracle,
    batch,
    blocks,
    configurations,
    first_weights,
)
from torch import nn

import hororing.torch as hvd
from hororing._engine.state import rank, size
from hororing._requests import handles
from hororing.toolkit.large_batch.outer import OuterSGD, SlowMo
from hororing.toolkit.torch.optim import (
    LAMB,
    LARS,
    HierarchicalSGD,
    StochasticRounding,
    early_updates,
    momenta,
    with_float32_update,
)

warnings.filterwarnings("ignore", message="HierarchicalSGD: gradient_groups")


def start() -> None:
    if not hvd.is_initialized():
        hvd.init()


def given(seed: int, step: int, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(seed, step, rank())
    return torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype)


class Linear(nn.Module):
    """The oracle's model."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(first_weights(seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def options_for(options: dict) -> dict:
    """Return HierarchicalSGD's arguments for those of the oracle."""
    made = {key: value for key, value in options.items() if key not in ("levels", "weights")}
    made["period_group_size_dict"] = {
        period: [list(group) for group in groups] for period, groups in options["levels"]
    }
    made.setdefault("gradient_groups", None)
    if "weights" in options:
        made["weight"] = options["weights"][rank()]
    if "outer" in options:
        kind, first, second = options["outer"]
        made["outer"] = SlowMo(first, second) if kind == "slowmo" else OuterSGD(first, second)
    return made


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, step: int) -> None:
    x, y = given(seed, step, next(model.parameters()).dtype)
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()


def case_weights_are_the_oracles() -> None:
    start()
    seed = mpirun.seed()
    for name, options in configurations(size()).items():
        oracle = Oracle(size(), seed, **options)
        model = Linear(seed)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = HierarchicalSGD(sgd, model.named_parameters(), **options_for(options))
        for step in range(1, 14):
            period = oracle.next()
            take_step(model, optimizer, seed, step)
            np.testing.assert_allclose(
                model.w.detach(), oracle.w[rank()], rtol=1e-9, atol=1e-9,
                err_msg=f"{name}, step {step}",
            )  # fmt: skip
            assert optimizer.steps_done == step
            if period is not None:
                assert optimizer.last_average == (step, period), name


def network() -> nn.Sequential:
    torch.manual_seed(mpirun.seed() % 1000)
    return nn.Sequential(
        nn.Linear(INPUTS, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, OUTPUTS)
    )  # fmt: skip


def groups_of_two() -> int:
    return 2 if size() % 2 == 0 else 1


def hierarchical(
    model: nn.Module, make: Callable = torch.optim.SGD, lr: float = 0.05, **options
) -> torch.optim.Optimizer:
    kind = {"momentum": 0.9} if make is torch.optim.SGD else {}
    options.setdefault("period_group_size_dict", {2: groups_of_two(), 4: "world"})
    options.setdefault("gradient_groups", None)
    optimizer = make(model.parameters(), lr=lr, **kind)
    return HierarchicalSGD(
        optimizer, model.named_parameters(), named_buffers=model.named_buffers(), **options
    )


def values(model: nn.Module) -> torch.Tensor:
    floats = [each for each in model.state_dict().values() if each.is_floating_point()]
    return torch.cat([each.flatten() for each in floats]).clone()


def of_all_ranks(model: nn.Module) -> torch.Tensor:
    return hvd.allgather(values(model)[None], name="values")


def case_groups_agree_when_their_level_has_averaged_and_not_else() -> None:
    start()
    model = network()
    optimizer = hierarchical(model)
    for step in range(1, 9):
        take_step(model, optimizer, 5, step)
        everybody = of_all_ranks(model)
        by = {0: size(), 2: groups_of_two()}.get(step % 4, 1)
        for group in blocks(size(), by):
            assert (everybody[group] == everybody[group[0]]).all()
        heads = everybody[::by]
        assert len(torch.unique(heads, dim=0)) == len(heads)


def case_delayed_averages_lose_no_update_of_buffers() -> None:
    start()
    for seed in range(5):  # with some of them, a mean changes its sign
        model, twin = network(), network()
        optimizer = hierarchical(model, lr=0.0, delay_steps=2)
        for step in range(1, 8):  # without learning, statistics are linear in the data
            take_step(model, optimizer, seed, step)
            with torch.no_grad():
                twin(given(seed, step, torch.float32)[0])
        optimizer.final_average()
        expected = hvd.allreduce(twin[1].running_mean, name="statistics")
        torch.testing.assert_close(model[1].running_mean, expected, rtol=1e-4, atol=1e-5)


def case_averages_keep_the_mean_of_a_group() -> None:
    start()
    for delay in (0, 1, 2):
        model = network()
        optimizer = hierarchical(model, delay_steps=delay, period_group_size_dict={3: "world"})
        seen = []

        def look(*_: object, model: nn.Module = model, seen: list = seen) -> None:
            seen.append(parameters_of(model))

        optimizer.register_step_post_hook(look)  # runs before the average
        for step in range(1, 4 + delay):
            take_step(model, optimizer, 5, step)
        before, after = (
            hvd.allreduce(each, name="mean") for each in (seen[-1], parameters_of(model))
        )
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)
        assert size() == 1 or not torch.equal(seen[-1], parameters_of(model))


def parameters_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def case_period_one_and_one_group_is_a_local_optimizer_on_averaged_weights() -> None:
    start()
    for make in (torch.optim.SGD, torch.optim.AdamW):
        model, twin = network(), network()
        optimizer = hierarchical(model, make, period_group_size_dict={1: "world"})
        kind = {"momentum": 0.9} if make is torch.optim.SGD else {}
        plain = make(twin.parameters(), lr=0.05, **kind)
        for step in range(1, 5):
            take_step(model, optimizer, 6, step)
            take_step(twin, plain, 6, step)
            with torch.no_grad():
                hvd.grouped_allreduce_(list(twin.parameters()))
            assert torch.equal(parameters_of(model), parameters_of(twin))


RESUMED = {
    "two levels, warm-up": {"warmup_steps": 3, "momentum": "reset"},
    "delayed": {"delay_steps": 2},
    "outer": {"outer": SlowMo(), "warmup_steps": 1, "momentum": "average"},
    "outer, delayed": {"outer": OuterSGD(), "delay_steps": 1},
    "in backward": {"overlap_backward": True, "warmup_steps": 2},
}


def case_a_run_resumed_at_any_step_is_the_same_run() -> None:
    start()
    steps = 7
    for name, options in RESUMED.items():
        for make in (torch.optim.SGD, torch.optim.Adam):
            model = network()
            optimizer = hierarchical(model, make, **options)
            saved = []
            for step in range(1, steps + 1):
                saved.append(copy.deepcopy([model.state_dict(), optimizer.state_dict()]))
                take_step(model, optimizer, 8, step)
            for done, (weights, state) in enumerate(saved):
                if make is torch.optim.Adam and done % 3:
                    continue
                again = network()
                resumed = hierarchical(again, make, **options)
                again.load_state_dict(weights)
                resumed.load_state_dict(state)
                assert resumed.steps_done == done
                for step in range(done + 1, steps + 1):
                    take_step(again, resumed, 8, step)
                assert torch.equal(values(again), values(model)), f"{name}, after step {done}"


def case_a_loaded_state_is_not_changed_by_training() -> None:
    start()
    model = network()
    optimizer = hierarchical(model, outer=SlowMo(), period_group_size_dict={1: "world"})
    take_step(model, optimizer, 1, 1)
    state = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(state)
    optimizer.load_state_dict(state)
    take_step(model, optimizer, 1, 2)
    mine, theirs = state["state"]["hierarchical_sgd"], kept["state"]["hierarchical_sgd"]
    assert mine["step"] == theirs["step"] == 1
    assert all(map(torch.equal, mine["previous"], theirs["previous"]))


def case_broadcast_optimizer_state_sets_the_clock() -> None:
    start()
    model = network()
    optimizer = hierarchical(model, warmup_steps=2, outer=SlowMo())
    for step in range(1, 6):
        take_step(model, optimizer, 1, step)
    optimizer.final_average()
    state, weights = optimizer.state_dict(), model.state_dict()
    again = network()
    resumed = hierarchical(again, warmup_steps=2, outer=SlowMo())
    if rank() == 0:
        again.load_state_dict(weights)
        resumed.load_state_dict(state)
    hvd.broadcast_parameters(again.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(resumed, root_rank=0)
    assert resumed.steps_done == 5
    take_step(again, resumed, 1, 6)
    assert resumed.last_average == (6, 4)
    assert len(torch.unique(of_all_ranks(again), dim=0)) == 1


def case_a_state_without_counter_is_refused() -> None:
    start()
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hierarchical(model)
    with pytest.raises(ValueError, match="no step counter"):
        optimizer.load_state_dict(plain.state_dict())
    with pytest.raises(TypeError, match="copied or pickled"):
        copy.deepcopy(optimizer)


def case_between_averages_nothing_is_sent() -> None:
    # Not even batch-norm statistics, for which a rank would wait for a late one: METHODS.md, 4.4.
    start()
    model = network()
    optimizer = hierarchical(model, period_group_size_dict={5: "world"})
    for step in range(1, 5):
        before = handles.submitted()
        take_step(model, optimizer, 1, step)
        assert handles.submitted() == before
    take_step(model, optimizer, 1, 5)
    assert size() == 1 or handles.submitted() > before


def case_final_average_makes_ranks_alike_once() -> None:
    start()
    for options in ({}, {"delay_steps": 1}, {"warmup_steps": 3}, {"overlap_backward": True}):
        model = network()
        optimizer = hierarchical(model, **options)
        for step in range(1, 4):
            take_step(model, optimizer, 2, step)
        mean = hvd.allreduce(values(model), name="mean")
        optimizer.final_average()
        everybody = of_all_ranks(model)
        assert (everybody == everybody[0]).all(), options
        if "delay_steps" not in options:  # with a delay, it first adds the pending average
            torch.testing.assert_close(everybody[0], mean)
        before = handles.submitted()
        optimizer.final_average()
        assert handles.submitted() == before
        take_step(model, optimizer, 2, 4)  # and training goes on


def case_a_parameter_may_lack_its_gradient_on_some_ranks() -> None:
    start()
    for options in ({}, {"momentum": "average"}, {"overlap_backward": True}, {"delay_steps": 1}):
        model = nn.ModuleDict({"all": nn.Linear(2, 2), "some": nn.Linear(2, 2)})
        for each in model.parameters():
            nn.init.constant_(each, 0.25)
        optimizer = hierarchical(model, torch.optim.Adam, **options)
        for _ in range(5):
            optimizer.zero_grad()
            out = model["all"](torch.full((1, 2), rank() + 1.0))
            if rank() % 2:
                out = model["some"](out)
            out.square().sum().backward()
            optimizer.step()
        optimizer.final_average()
        everybody = of_all_ranks(model)
        assert (everybody == everybody[0]).all()


def case_tensors_keep_their_types_and_memory() -> None:
    start()
    model = network()
    model[3].bfloat16()
    model.append(nn.Linear(OUTPUTS, OUTPUTS).double())
    model.register_buffer("count", torch.tensor(rank()))
    images = nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last) * rank())
    model.register_parameter("images", images)
    optimizer = hierarchical(model, period_group_size_dict={1: "world"})
    before = {name: (each.data_ptr(), each.dtype) for name, each in model.state_dict().items()}
    for _ in range(2):
        optimizer.zero_grad()
        sum(each.float().square().sum() for each in model.parameters()).backward()
        optimizer.step()
    after = {name: (each.data_ptr(), each.dtype) for name, each in model.state_dict().items()}
    assert after == before
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert int(model.count) == rank()  # counters are not averaged
    everybody = hvd.allgather(images.detach().contiguous()[None], name="images")
    assert (everybody == everybody[0]).all()


def case_all_ranks_skip_a_step_with_an_infinity_on_one() -> None:
    start()
    model = Linear(1).float()
    optimizer = HierarchicalSGD(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
        period_group_size_dict={2: "world"}, gradient_groups=None,
    )  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(1, 7):
        x, y = given(3, step, torch.float32)
        optimizer.zero_grad()
        scaler.scale(((model(x) - y) ** 2).mean()).backward()
        before = model.w.detach().clone()
        if step == 4 and rank() == size() - 1:
            model.w.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.w) == (step == 4)
        assert scaler.get_scale() == (1024.0 if step < 4 else 512.0)
    assert optimizer.steps_done == 5
    assert optimizer.last_average == (4, 2)


def case_lars_and_lamb_take_the_steps_that_they_take_alone() -> None:
    start()
    for make in (LARS, LAMB):
        model, alone = network(), network()
        optimizer = hierarchical(model, make, period_group_size_dict={4: "world"})
        other = make(alone.parameters(), lr=0.05)
        for step in range(1, 5):
            take_step(model, optimizer, 6, step)
            take_step(alone, other, 6, step)
            if step < 4:
                assert torch.equal(values(model), values(alone)), (make, step)
        torch.testing.assert_close(values(model), hvd.allreduce(values(alone), op=hvd.Average))


def case_averages_inside_backward_are_those_after_it() -> None:
    start()
    early_updates.BUCKET_BYTES = 100  # for several buckets
    tied = nn.Linear(OUTPUTS, OUTPUTS)
    hvd.broadcast_parameters(tied.state_dict(), root_rank=0)
    first, second = (nn.Sequential(network(), copy.deepcopy(tied)) for _ in range(2))
    for each in (first, second):
        each.append(each[1])  # a layer that is used twice
    late = list(first[1].parameters())
    early = hierarchical(first, overlap_backward=True, late_parameters=late, warmup_steps=1)
    plain = hierarchical(second, warmup_steps=1)
    updated = 0
    for step in range(1, 10):
        x, y = given(4, step, torch.float32)
        for model, optimizer in ((first, early), (second, plain)):
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            updated += early._early.begun and model is first
            optimizer.step()
        assert torch.equal(values(first), values(second)), step
    assert updated == 4  # in steps 3, 5, 7, 9


def case_early_updates_come_in_every_step_and_round_anew() -> None:
    param = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    rounding = StochasticRounding(seed=1)
    inner = with_float32_update(torch.optim.SGD([param], lr=1e-3), rounding=rounding)
    optimizer = HierarchicalSGD(
        inner, [("w", param)],
        period_group_size_dict={1: "world"}, gradient_groups=None, overlap_backward=True,
    )  # fmt: skip
    early = 0
    for _ in range(100):
        optimizer.zero_grad()
        param.float().sum().neg().backward()
        early += optimizer._early.begun
        optimizer.step()
    assert early == 99
    assert optimizer.param_groups[0]["rounding_step"] == 100
    assert param.double().mean().item() == pytest.approx(1.1, abs=3e-3)


def case_what_cannot_be_updated_early_says_so() -> None:
    start()
    model = Linear(1)
    optimizer = HierarchicalSGD(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
        period_group_size_dict={2: "world"}, gradient_groups=None, overlap_backward=True,
    )  # fmt: skip
    take_step(model, optimizer, 1, 1)
    x, y = given(1, 2)
    ((model(x) - y) ** 2).mean().backward()
    with pytest.raises(AssertionError, match="late_parameters"):
        ((model(x) - y) ** 2).mean().backward()
    with pytest.raises(AssertionError, match="inside backward"):
        optimizer.zero_grad()
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: None)
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    scaler.scale(((model(x) - y) ** 2).mean()).backward()
    with pytest.raises(ValueError, match="GradScaler"):
        scaler.step(optimizer)


def case_wrong_use_is_an_error_on_every_rank() -> None:
    start()
    last = size() - 1

    def refused(match: str, elsewhere: str = "", **options) -> None:
        mine = match if rank() == last or not elsewhere else elsewhere
        with pytest.raises((ValueError, TypeError), match=mine):
            hierarchical(network(), **options)

    def on_last(wrong: object, right: object) -> object:
        return wrong if rank() == last else right

    refused(r"level 2 \(period 3\).*not a multiple", period_group_size_dict={2: 1, 3: "world"})
    refused("momentum='sum' must be", momentum="sum")
    refused("delay_steps=3 is more", delay_steps=3)
    refused("delay_steps cannot", delay_steps=1, momentum="average")
    refused("overlap_backward cannot", overlap_backward=True, momentum="average")
    refused("exclude each other", overlap_backward=True, delay_steps=1)
    refused("outer must be", outer="slowmo")
    if size() > 1:
        refused("gradient_groups=None", gradient_groups="world", overlap_backward=True)
        refused(
            "momentum='none'", f"rank {last} has failed.*momentum='none'",
            momentum=on_last("none", "keep"),
        )  # fmt: skip
        refused(
            "backward_passes_per_step=0", f"rank {last} has failed",
            backward_passes_per_step=on_last(0, 1),
        )  # fmt: skip
        refused("ranks differ in delay_steps", delay_steps=on_last(1, 0))
        refused("ranks differ in hierarchy", warmup_steps=on_last(1, 0))
        refused("ranks differ in weight", weight=on_last(1.0, None))
    with pytest.raises(TypeError, match="LBFGS"):
        hierarchical(network(), torch.optim.LBFGS)
    clipping = functools.partial(LARS, lr=0.1, max_norm=1.0)
    with pytest.raises(ValueError, match="max_norm"):
        hierarchical(network(), clipping, overlap_backward=True)
    model = network()
    optimizer = hierarchical(model, torch.optim.Rprop, momentum="reset")
    take_step(model, optimizer, 1, 1)
    with pytest.raises(ValueError, match="momentum_keys=\\['prev'"):
        take_step(model, optimizer, 1, 2)


def case_a_reset_of_nadam_starts_its_product_of_momenta_again() -> None:
    param = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.NAdam([param], lr=0.1)
    steps = []
    for _ in range(2):
        before = param.detach().clone()
        for _ in range(3):
            param.grad = torch.ones(3)
            optimizer.step()
        steps.append(param.detach() - before)
        momenta.reset(optimizer, [param], momenta.KNOWN)
    torch.testing.assert_close(*steps)


def case_a_rank_that_has_joined_does_not_count() -> None:
    start()
    model = network()
    optimizer = hierarchical(model, period_group_size_dict={2: "world"})
    for step in range(1, 5 if rank() else 4):
        take_step(model, optimizer, 1, step)
    hvd.join()
    everybody = of_all_ranks(model)
    if size() > 1:
        assert (everybody[1:] == everybody[1]).all()
        assert everybody[1].norm() > 0.9 * everybody[0].norm()


def case_groups_can_be_formed_anew() -> None:
    start()
    model = network()
    optimizer = hierarchical(model)
    take_step(model, optimizer, 1, 1)
    optimizer.regroup(period_group_size_dict={1: blocks(size(), 1), 3: [list(range(size()))]})
    take_step(model, optimizer, 1, 2)
    assert optimizer.last_average == (2, 1)
    with pytest.raises(ValueError, match=rf"rank {size()}; there are {size()} ranks"):
        optimizer.regroup(period_group_size_dict={1: [list(range(size() + 1))]})
    hvd.shutdown()
    hvd.init()
    optimizer.regroup(gradient_groups=groups_of_two())
    take_step(model, optimizer, 1, 3)
    assert optimizer.last_average == (3, 3)
    everybody = of_all_ranks(model)
    assert (everybody == everybody[0]).all()


test_on_ranks = session.on_ranks(globals(), 1, 3, 4, push=[4], session="torch")
