"""toolkit.torch.optim on several ranks: one trajectory, and one decision about infinities."""

from __future__ import annotations

import io

import mpirun
import pytest
import session
import torch
from torch import nn

import hororing.torch as hvd
from hororing.toolkit.large_batch.schedules import WarmupPolynomial
from hororing.toolkit.torch.optim import (
    LAMB,
    LARS,
    GradScaler,
    ScheduleLR,
    StochasticCast,
    StochasticRounding,
    parameter_groups,
    with_float32_update,
)

SIZE = 4
PAIRS = [[0, 1], [2, 3]]


def start() -> hvd.ProcessSet:
    """Call init with process sets of two ranks; return this rank's pair."""
    pairs = [hvd.ProcessSet(ranks) for ranks in PAIRS]
    hvd.init(process_sets=pairs)
    return next(pair for pair in pairs if pair.included())


def network(dtype=torch.float32, seed=1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)


def batches(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(mpirun.seed())
    for _ in range(count):
        yield torch.randn(2 * SIZE, 5, generator=generator).to(dtype)


def mine(inputs):
    return inputs[hvd.rank() :: hvd.size()]


def loss_of(model, inputs):
    return (model(inputs).float() - 1).square().mean()


def weights(model):
    return [param.detach().clone() for param in model.parameters()]


def same(one, other) -> bool:
    return all(map(torch.equal, one, other))


def equal_everywhere(*tensors) -> bool:
    values = hvd.allgather_object([tensor.detach().clone() for tensor in tensors])
    return all(same(values[0], others) for others in values)


def case_ranks_take_the_steps_of_one_process_with_the_whole_batch():
    start()
    for make in (LARS, LAMB):
        schedule = WarmupPolynomial(peak=0.5, total_steps=20, warmup_steps=5)
        models = [network(torch.float64) for _ in range(2)]
        optimizers = [make(parameter_groups(model, 0.01), lr=1.0) for model in models]
        hvd.DistributedOptimizer(optimizers[0])
        schedulers = [ScheduleLR(optimizer, schedule) for optimizer in optimizers]
        for inputs in batches(20, torch.float64):
            for model, optimizer, scheduler, part in zip(
                models, optimizers, schedulers, (mine(inputs), inputs), strict=True
            ):
                optimizer.zero_grad()
                loss = (model(part) - 1).square().mean()
                loss.backward()
                optimizer.step()
                scheduler.step()
        assert not same(weights(models[0]), weights(network(torch.float64)))
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    hvd.shutdown()


def rounded(seed, steps=60, resume_at=None):
    """Train in bfloat16 with stochastic rounding; optionally save and load in the middle."""
    model = network(torch.bfloat16)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = LARS(parameter_groups(model, 0.01), lr=0.2, rounding=StochasticRounding(seed))
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for step, inputs in enumerate(batches(steps, torch.bfloat16)):
        if step == resume_at:
            torch.save([model.state_dict(), optimizer.state_dict()], file := io.BytesIO())
            file.seek(0)
            states = torch.load(file, weights_only=True)
            model = network(torch.bfloat16, seed=9)
            model.load_state_dict(states[0])
            optimizer = LARS(parameter_groups(model, 0.0), lr=9.0, rounding=StochasticRounding(5))
            optimizer.load_state_dict(states[1])
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        optimizer.zero_grad()
        loss_of(model, mine(inputs)).backward()
        optimizer.step()
    return weights(model)


def case_replicas_stay_identical_with_stochastic_rounding_also_when_resumed():
    start()
    first = rounded(100 + hvd.rank())  # rank 0's seed counts
    assert equal_everywhere(*first)
    assert same(first, rounded(100))
    assert same(first, rounded(100, resume_at=37))
    assert not same(first, rounded(101))
    random = rounded(None)
    assert equal_everywhere(*random)
    assert not same(random, rounded(None))
    hvd.shutdown()


def case_activations_are_rounded_differently_on_each_rank():
    start()
    out = StochasticCast(seed=3)(torch.full((1000,), 1.003))
    assert len({tuple(each.tolist()) for each in hvd.allgather_object(out)}) == SIZE
    hvd.shutdown()


def case_a_new_rank_gets_master_weights_by_broadcast():
    start()
    model = network(torch.bfloat16, seed=hvd.rank())
    optimizer = with_float32_update(torch.optim.AdamW(model.parameters(), 0.01))
    if hvd.rank() == 0:  # only this one has trained before
        for inputs in batches(3, torch.bfloat16):
            loss_of(model, inputs).backward()
            optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    masters = [optimizer.state[param]["float32_weight"] for param in model.parameters()]
    assert all(master.dtype == torch.float32 for master in masters)
    assert equal_everywhere(*masters)
    for inputs in batches(3, torch.bfloat16):
        optimizer.zero_grad()
        loss_of(model, mine(inputs)).backward()
        optimizer.step()
    masters = [optimizer.state[param]["float32_weight"] for param in model.parameters()]
    assert equal_everywhere(*masters, *weights(model))
    hvd.shutdown()


# -- V12: infinities ------------------------------------------------------------------------------


def train_with_infinity(scaler, pair, reduces, kind, bad_step=2, steps=5):
    """Return in which steps this rank's weights changed; rank 1 has an infinity in `bad_step`."""
    model = network(torch.float32 if kind == "sgd" else torch.float16)
    if kind == "lars":
        optimizer = LARS(parameter_groups(model, 0.01), lr=5.0)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        if kind == "float32_update":
            optimizer = with_float32_update(optimizer)
    if reduces == "all":
        optimizer = hvd.DistributedOptimizer(optimizer)
    elif reduces == "float16":
        optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16)
    elif reduces == "pairs":
        optimizer = hvd.DistributedOptimizer(optimizer, process_set=pair)
    elif reduces == "adasum":
        optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
    changed = []
    for step, inputs in enumerate(batches(steps, next(model.parameters()).dtype)):
        before = weights(model)
        optimizer.zero_grad()
        loss = loss_of(model, mine(inputs))
        if step == bad_step and hvd.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        changed.append(not same(before, weights(model)))
    return changed


def case_an_infinity_on_one_rank_makes_all_ranks_skip_the_step():
    pair = start()
    for kind in ("sgd", "float32_update", "lars"):
        for reduces in ("all", "float16", "pairs", "nobody", "adasum"):
            if reduces == "adasum" and kind == "lars":
                continue
            scaler = GradScaler("cpu", init_scale=64.0, growth_interval=4)
            changed = train_with_infinity(scaler, pair, reduces, kind)
            assert changed == [True, True, False, True, True], (kind, reduces, changed)
            assert scaler.get_scale() == 32.0, (kind, reduces)
    # The scaler's process set may be smaller.
    scaler = GradScaler("cpu", init_scale=64.0, process_set=pair)
    changed = train_with_infinity(scaler, pair, "pairs", "sgd")
    assert changed[2] == (hvd.rank() >= 2)
    assert scaler.get_scale() == (64.0 if hvd.rank() >= 2 else 32.0)
    hvd.barrier()
    hvd.shutdown()


def case_the_scaler_of_torch_decides_alike_only_where_all_reduce_with_all():
    pair = start()
    for reduces in ("all", "adasum"):
        for kind in ("sgd", "float32_update"):
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            changed = train_with_infinity(scaler, pair, reduces, kind)
            assert changed == [True, True, False, True, True], (kind, reduces)
            assert scaler.get_scale() == 32.0
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    changed = train_with_infinity(scaler, pair, "pairs", "sgd")
    assert changed[2] == (hvd.rank() >= 2)  # which is why hororing has its own scaler
    hvd.barrier()
    hvd.shutdown()


def case_unscaling_before_the_step_agrees_as_well():
    start()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model, torch.ones(2, 5))).backward()
    if hvd.rank() == 2:
        model[0].weight.grad[0, 0] = float("nan")
    before = weights(model)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert same(before, weights(model))
    assert scaler.get_scale() == 4.0
    hvd.shutdown()


def case_an_optimizer_that_unscales_itself_gets_the_scaler():
    class Unscaling(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, grad_scaler=None):
            scale = grad_scaler.get_scale() if grad_scaler is not None else 1.0
            for param in self.param_groups[0]["params"]:
                param.data.sub_(param.grad / scale)

    start()
    param = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(Unscaling([param], lr=1.0), [("param", param)])
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(param.sum()).backward()
    with pytest.warns(FutureWarning, match="passing itself"):  # torch's own
        scaler.step(optimizer)
    assert param.tolist() == [-1.0, -1.0]
    hvd.shutdown()


def case_the_sum_of_float16_gradients_does_not_overflow():
    start()
    for factor in (1.0, 2.0, float(SIZE)):
        param = nn.Parameter(torch.zeros(1000, dtype=torch.float16))
        optimizer = with_float32_update(torch.optim.SGD([param], lr=1.0))
        optimizer = hvd.DistributedOptimizer(optimizer, gradient_predivide_factor=factor)
        (param * 60_000.0).sum().backward()  # the sum is beyond 65,504
        optimizer.step()
        assert (param == -60_000).all(), factor
    hvd.shutdown()


test_on_ranks = session.on_ranks(globals(), SIZE, push=[SIZE], session="torch")
