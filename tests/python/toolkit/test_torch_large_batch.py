"""toolkit.torch.optim in one process: optimizers against an oracle, groups, schedules, bits."""

from __future__ import annotations

import copy
import io
import math

import layerwise_oracle as oracle
import numpy as np
import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from hororing.toolkit.large_batch.schedules import WarmupPolynomial
from hororing.toolkit.torch.optim import (
    LAMB,
    LARS,
    ScheduleLR,
    StochasticCast,
    StochasticRounding,
    parameter_groups,
    with_float32_update,
    zero_last_gammas,
)

SEED = 5


def train(make, options, dtype=torch.float64, steps=oracle.STEPS, scale=1.0):
    """Solve the oracle's problem with torch's tensors."""
    params = [nn.Parameter(torch.tensor(w, dtype=dtype)) for w in oracle.beginning(SEED)]
    decay = options["weight_decay"]
    optimizer = make(
        [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": decay, "adapt": True},
            {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "adapt": False},
        ],
        lr=1.0, **{key: value for key, value in options.items() if key != "weight_decay"},
    )  # fmt: skip
    scheduler = ScheduleLR(optimizer, oracle.rate)
    for noise, _ in zip(oracle.noises(SEED), range(steps), strict=False):
        for param, each in zip(params, noise, strict=True):
            param.grad = scale * oracle.gradient(param.detach(), torch.tensor(each, dtype=dtype))
        optimizer.step()
        scheduler.step()
    return [param.detach().double().numpy() for param in params]


@pytest.mark.parametrize("variant", oracle.LARS_VARIANTS, ids=str)
def test_lars_follows_its_paper_in_every_variant(variant):
    options = {**oracle.LARS_DEFAULTS, **variant}
    expected = oracle.trajectory(oracle.lars, options, SEED)
    oracle.assert_close(train(LARS, options), expected, 1e-12)
    oracle.assert_close(train(LARS, options, torch.float32), expected, 1e-6)


@pytest.mark.parametrize("variant", oracle.LAMB_VARIANTS, ids=str)
def test_lamb_follows_its_paper(variant):
    options = {**oracle.LAMB_DEFAULTS, **variant}
    expected = oracle.trajectory(oracle.lamb, options, SEED)
    oracle.assert_close(train(LAMB, options), expected, 1e-12)
    oracle.assert_close(train(LAMB, options, torch.float32), expected, 2e-6)


def test_variants_differ():
    ends = [
        np.concatenate([
            w.ravel() for w in oracle.trajectory(oracle.lars, {**oracle.LARS_DEFAULTS, **v}, SEED)
        ])
        for v in oracle.LARS_VARIANTS
    ]  # fmt: skip
    for at, end in enumerate(ends):
        assert all(np.abs(end - other).max() > 1e-4 for other in ends[:at]), at


def test_without_decay_and_eps_the_scale_of_gradients_does_not_matter():
    options = {**oracle.LARS_DEFAULTS, "weight_decay": 0.0}
    # For one-dimensional tensors and those with norm 0, which follow plain SGD, it does.
    one, other = (
        [train(LARS, options, steps=3, scale=scale)[at] for at in (0, 1)] for scale in (1.0, 1e-3)
    )
    # The gradients depend on the weights, which are equal, so all later results are equal.
    oracle.assert_close(one, other, 1e-12)


def test_one_dimensional_tensors_follow_plain_momentum_sgd():
    for form in ("scaled", "unscaled"):
        param, twin = (nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))
        lars = LARS([{"params": [param], "adapt": False}], lr=0.1, momentum_form=form)
        sgd = torch.optim.SGD([twin], lr=0.1, momentum=0.9)
        for noise in torch.randn(20, 5, dtype=torch.float64):
            param.grad, twin.grad = noise.clone(), noise.clone()
            lars.step()
            sgd.step()
        torch.testing.assert_close(param, twin, rtol=1e-13, atol=1e-13)


def test_norms_of_many_elements_are_added_up_in_float64(monkeypatch):
    from hororing.toolkit.torch.optim import layerwise

    values = torch.full((3001, 1001), 1.1)
    exact = math.sqrt(values.numel()) * float(values[0, 0])
    monkeypatch.setattr(layerwise, "_MANY", 1000)
    found = layerwise.norms([values, torch.tensor([3.0, 4.0])])
    assert found.dtype == torch.float32
    assert found[0].item() == pytest.approx(exact, rel=1e-7)
    assert found[1].item() == 5.0


# -- parameters of 16 bits -------------------------------------------------------------------------


def short_problem(dtype, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    return model, LARS(parameter_groups(model, 0.01), lr=0.05, trust_coefficient=0.1, **options)


def steps(model, optimizer, count, begin=0):
    for number in range(begin, begin + count):
        generator = torch.Generator().manual_seed(number)
        dtype = next(model.parameters()).dtype
        inputs = torch.randn(16, 6, generator=generator).to(dtype)
        optimizer.zero_grad()
        model(inputs).float().square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", ["lars", "adamw", "sgd", "adagrad"])
def test_master_weights_are_updated_as_float32_weights_would_be(dtype, make):
    optimizers = {
        "lars": lambda p: LARS(p, lr=0.05, trust_coefficient=0.1, weight_decay=0.01),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.5),
    }
    short = [nn.Parameter(torch.randn(4, 3).to(dtype)), nn.Parameter(torch.randn(3).to(dtype))]
    full = [nn.Parameter(p.detach().float()) for p in short]
    optimizer, plain = optimizers[make](short), optimizers[make](full)
    if make != "lars":
        assert with_float32_update(optimizer) is optimizer
        assert isinstance(optimizer, type(plain))
    for _ in range(30):
        for param, twin in zip(short, full, strict=True):
            param.grad = torch.randn_like(param)
            twin.grad = param.grad.float()
        optimizer.step()
        plain.step()
        for param, twin in zip(short, full, strict=True):
            assert torch.equal(param, twin.to(dtype))
            assert torch.equal(optimizer.state[param]["float32_weight"], twin)
    assert [group["params"] for group in optimizer.param_groups] == [short]
    assert set(optimizer.state) == set(short)


def test_what_others_write_into_parameters_is_kept():
    model, optimizer = short_problem(torch.bfloat16)
    steps(model, optimizer, 3)
    weight = model[0].weight
    master = optimizer.state[weight]["float32_weight"].clone()
    weight.data[0] = 3.0  # like an average, a broadcast or a checkpoint
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        group["momentum"] = 0.0
    steps(model, optimizer, 1)
    assert (weight[0] == 3).all()
    assert torch.equal(optimizer.state[weight]["float32_weight"][1:], master[1:])


@pytest.mark.parametrize("rounding", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one(rounding, wrapped):
    def problem(seed):
        options = {"rounding": StochasticRounding(seed) if rounding else None}
        if not wrapped:
            return short_problem(torch.bfloat16, **options)
        model = short_problem(torch.bfloat16)[0]
        return model, with_float32_update(torch.optim.Adam(model.parameters(), 0.01), **options)

    model, optimizer = problem(11)
    steps(model, optimizer, 4)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    for state in states[1]["state"].values():
        assert all(v.dtype == torch.float32 for v in state.values())
        assert ("float32_weight" in state) != rounding
    resumed, its_optimizer = problem(12)  # the seed comes from the file
    resumed.load_state_dict(states[0])
    its_optimizer.load_state_dict(states[1])
    steps(model, optimizer, 5, begin=4)
    steps(resumed, its_optimizer, 5, begin=4)
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    other, another = problem(13)
    steps(other, another, 9)
    same = [torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True)]
    assert all(same) != rounding


def test_small_updates_of_bfloat16_are_lost_unless_rounded_at_random():
    ends = {}
    for rounding in (None, StochasticRounding(3)):
        param = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = with_float32_update(torch.optim.SGD([param], lr=1e-3), rounding=rounding)
        if rounding is None:
            optimizer = torch.optim.SGD([param], lr=1e-3)
        for _ in range(1000):
            param.grad = torch.full_like(param, -1.0)
            optimizer.step()
        ends[rounding is None] = param.detach().double()
    assert (ends[True] == 1).all()
    # The standard deviation of an element is 0.083, that of the mean 0.0013.
    assert ends[False].mean().item() == pytest.approx(2.0, abs=0.01)


# V11: a typical layer with LARS at large batches: weights of 0.02, heavy-tailed gradients of 1e-5.
def test_float16_needs_master_weights_and_a_scale():
    random = np.random.default_rng(0)
    weight = random.normal(scale=0.02, size=(256, 256))
    grad = random.standard_t(1.5, size=weight.shape) * 1e-5
    lr, eta = 0.1, 0.001
    exact = weight - lr * eta * oracle.norm(weight) / oracle.norm(grad) * grad
    naive = torch.tensor(weight, dtype=torch.float16)
    change = (lr * eta * oracle.norm(weight) / oracle.norm(grad)) * torch.tensor(grad).half()
    assert ((naive - change) == naive).double().mean() >= 0.9

    param = nn.Parameter(torch.tensor(weight, dtype=torch.float16))
    optimizer = LARS([param], lr=lr, momentum=0.0, trust_coefficient=eta)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    param.grad = torch.tensor(grad * 1024).half()
    scaler.step(optimizer)
    scaler.update()
    master = optimizer.state[param]["float32_weight"].double().numpy()
    start = torch.tensor(weight).half().double().numpy()
    moved, expected = master - start, exact - weight
    assert oracle.norm(moved - expected) / oracle.norm(expected) <= 1e-3


def test_a_fused_step_of_torch_sees_gradients_without_the_scale_once():
    ends = []
    for fused in (False, True):
        param = nn.Parameter(torch.ones(4, dtype=torch.float16))
        optimizer = with_float32_update(torch.optim.SGD([param], lr=0.5, fused=fused))
        scaler = GradScaler("cpu", init_scale=8.0)
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert not hasattr(optimizer, "found_inf")
        ends.append(param.detach())
    assert torch.equal(ends[0], torch.full((4,), 0.5).half())
    assert torch.equal(*ends)


def test_gradients_of_16_bits_are_clipped_in_float32():
    for scaler in (None, GradScaler("cpu", init_scale=2.0**10)):
        param = nn.Parameter(torch.zeros(4, dtype=torch.float16))
        optimizer = with_float32_update(torch.optim.SGD([param], lr=1.0), max_norm=0.5)
        loss = 3 * param.sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step() if scaler is None else scaler.step(optimizer)
        torch.testing.assert_close(param, torch.full_like(param, -0.25), rtol=1e-3, atol=0)


def test_copies_clip_too():
    ends = []
    for again in (lambda optimizer: optimizer, copy.deepcopy):
        param = nn.Parameter(torch.tensor([[1.0, 2.0]]))
        optimizer = again(LARS([param], lr=0.1, weight_decay=1.0, max_norm=0.5))
        (param,) = optimizer.param_groups[0]["params"]
        param.grad = torch.tensor([[3.0, 0.0]])
        optimizer.step()
        ends.append(param.detach())
    assert torch.equal(*ends)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_a_plain_checkpoint_continues_in_float32(make):
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    options = {"lr": 0.1} if make is torch.optim.AdamW else {"lr": 0.1, "momentum": 0.9}
    plain, ours = make([param], **options), with_float32_update(make([param], **options))
    param.grad = torch.full_like(param, 3.0)
    plain.step()
    ours.load_state_dict(plain.state_dict())
    ours.step()
    floats = [each for each in ours.state[param].values() if each.is_floating_point()]
    assert {each.dtype for each in floats} == {torch.float32}


# -- refusals -------------------------------------------------------------------------------------


def test_wrong_options_are_refused_by_name():
    params = [nn.Parameter(torch.ones(2, 2))]
    for options in (
        {"momentum": 1.0}, {"weight_decay": -1.0}, {"denominator": "both"}, {"eps": -1.0},
        {"momentum_form": "none"}, {"nesterov": True, "momentum": 0.0}, {"lr": -1.0},
        {"max_norm": 0.0},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(options))):
            LARS(params, **{"lr": 0.1, **options})
    with pytest.raises(TypeError, match="StochasticRounding"):
        LARS(params, lr=0.1, rounding=3)
    for options in ({"betas": (1.0, 0.9)}, {"phi": (2, 1)}, {"phi": abs}, {"eps": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            LAMB(params, **options)
    optimizer = LARS(params, lr=0.1)
    with pytest.raises(ValueError, match="in float32 already"):
        with_float32_update(optimizer)
    with pytest.raises(ValueError, match="LBFGS"):
        with_float32_update(torch.optim.LBFGS(params))
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse_as_dense"):
        LARS(embedding.parameters(), lr=0.1).step()
    waves = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    waves.grad = torch.ones_like(waves)
    for kind in (LARS, LAMB):
        with pytest.raises(TypeError, match="complex"):
            kind([waves], lr=0.1).step()


# -- groups ---------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3)
        self.bn = nn.BatchNorm2d(2)
        self.norm = nn.LayerNorm((2, 3))
        self.head = nn.Linear(4, 2)


def test_only_weights_decay_and_adapt():
    model = Block()
    model.head.weight.requires_grad_(False)
    first, second = parameter_groups(model, 0.1)
    assert [id(p) for p in first["params"]] == [id(model.conv.weight)]
    assert (first["weight_decay"], first["adapt"]) == (0.1, True)
    # The weight of the LayerNorm has two dimensions.
    assert len(second["params"]) == 6
    assert (second["weight_decay"], second["adapt"]) == (0.0, False)


def test_the_two_lists_of_exclusions_are_separate():
    model = Block()
    groups = parameter_groups(
        model, 0.1, exclude_from_decay=["bias$"],
        exclude_from_adaptation=lambda name, param: name.startswith("head"),
    )  # fmt: skip
    names = {id(p): name for name, p in model.named_parameters()}
    kinds = {(g["weight_decay"], g["adapt"]): {names[id(p)] for p in g["params"]} for g in groups}
    assert kinds == {
        (0.1, True): {"conv.weight", "bn.weight", "norm.weight"},
        (0.0, True): {"conv.bias", "bn.bias", "norm.bias"},
        (0.1, False): {"head.weight"},
        (0.0, False): {"head.bias"},
    }
    with pytest.raises(ValueError, match=r"exclude_from_decay: '\(' is not a regular expression"):
        parameter_groups(model, 1e-4, exclude_from_decay=["("])
    with pytest.raises(ValueError, match="'gamma' matches no parameter"):
        parameter_groups(model, 0.1, exclude_from_decay=["gamma"])
    with pytest.raises(TypeError, match="must be a list"):
        parameter_groups(model, 0.1, exclude_from_decay="bias")


def test_last_gammas_become_zero():
    model = nn.Sequential(Block(), Block())
    zero_last_gammas(model, [r"\d\.bn"])
    assert all((block.bn.weight == 0).all() and (block.norm.weight == 1).all() for block in model)
    with pytest.raises(ValueError, match="matches no module"):
        zero_last_gammas(model, ["bn"])
    with pytest.raises(ValueError, match="Conv2d"):
        zero_last_gammas(model, [r"\d\.conv"])


@pytest.mark.skipif(not hasattr(nn, "RMSNorm"), reason="this PyTorch has none")
def test_rms_norms_are_normalisation_layers():
    model = nn.Sequential(nn.RMSNorm((2, 3)))
    (group,) = parameter_groups(model, 0.1)
    assert (group["weight_decay"], group["adapt"]) == (0.0, False)
    zero_last_gammas(model, ["0"])
    assert (model[0].weight == 0).all()


# -- schedules ------------------------------------------------------------------------------------


def test_a_schedule_drives_groups_and_resumes():
    schedule = WarmupPolynomial(peak=2.0, total_steps=20, warmup_steps=4, start=0.5, end=0.1)
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [p]} for p in params], lr=9.0)
    scheduler = ScheduleLR(optimizer, schedule, factors=[1.0, 0.5])
    seen = []
    for step in range(25):
        assert [g["lr"] for g in optimizer.param_groups] == [schedule(step), schedule(step) / 2]
        assert scheduler.get_last_lr() == [schedule(step), schedule(step) / 2]
        seen.append(copy.deepcopy(scheduler.state_dict()))
        optimizer.step()
        scheduler.step()
    again = ScheduleLR(torch.optim.SGD([{"params": [p]} for p in params], lr=1.0), schedule)
    again.load_state_dict(seen[7])
    assert [g["lr"] for g in again.optimizer.param_groups] == [schedule(7), schedule(7) / 2]
    again.step()
    assert again.get_last_lr() == [schedule(8), schedule(8) / 2]
    torch.save(seen[7], file := io.BytesIO())
    file.seek(0)
    torch.load(file, weights_only=True)


# -- stochastic rounding --------------------------------------------------------------------------


def test_activations_are_rounded_at_random_in_training_and_gradients_pass():
    layer = StochasticCast(seed=1)
    inputs = torch.full((2000,), 1.003, requires_grad=True)
    first, second = layer(inputs), layer(inputs)
    assert first.dtype == torch.bfloat16
    assert not torch.equal(first, second)
    assert first.float().mean().item() == pytest.approx(1.003, abs=5e-4)
    (first.float() * 2).sum().backward()
    assert (inputs.grad == 2).all()
    resumed = StochasticCast(seed=1)
    resumed.load_state_dict(layer.state_dict())
    assert torch.equal(resumed(inputs), layer(inputs))
    assert torch.equal(layer.eval()(inputs), inputs.bfloat16())
