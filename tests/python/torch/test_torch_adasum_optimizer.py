"""DistributedOptimizer with op=Adasum does what its paper says; the oracle is in this file.

Every rank knows the whole batch, and keeps a twin of the model and of the plain optimizer for each
rank. The twins step with the shares of their ranks, and `adasum` below combines their changes.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable

import pytest
import session
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_training import (
    STEPS,
    Careless,
    Make,
    assert_equal_on_all_ranks,
    assert_same,
    backward,
    batches,
    distributed,
    network,
    plain_sgd,
    sgd,
    share,
    squares,
    start,
    train,
)

import hororing.torch as hvd
from hororing._engine.state import size
from hororing._requests.arguments import Adasum
from hororing.errors import MismatchError

# Sums of products are in another order. Optimizers that divide by small differences amplify this.
TOLERANCE = 1e-7
Loss = Callable[..., torch.Tensor]  # takes a model, a rank and, optionally, a pass


def adasum(parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    a, b = adasum(parts[:half]), adasum(parts[half:])
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    left = 1 - dot / (2 * aa) if aa > 0 else 1.0
    right = 1 - dot / (2 * bb) if bb > 0 else 1.0
    return left * a + right * b


class AllRanks:
    """A model with op=Adasum, and for each rank a twin with the plain optimizer."""

    def __init__(self, make: Make = sgd, model: nn.Module | None = None, **options) -> None:
        self.model = network() if model is None else model
        self.twins = [copy.deepcopy(self.model) for _ in range(size())]
        self.plains = [make(twin.parameters()) for twin in self.twins]
        self.optimizer = distributed(self.model, make, op=Adasum, **options)

    def step(
        self,
        loss: Loss,
        passes: int = 1,
        after_backward=lambda module: None,
        set_to_none=True,
        twins_only: bool = False,
    ) -> None:
        before = [param.detach().clone() for param in self.twins[0].parameters()]
        pairs = zip(range(size()), self.twins, self.plains, strict=True)
        own = [] if twins_only else [(hvd.rank(), self.model, self.optimizer)]
        for rank, module, optimizer in [*own, *pairs]:
            optimizer.zero_grad(set_to_none)
            for number in range(passes):
                backward(loss(module, rank) if passes == 1 else loss(module, rank, number))
            after_backward(module)
            optimizer.step()
        self.combine(before)

    def combine(self, before: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for old, *params in zip(before, *(m.parameters() for m in self.twins), strict=True):
                new = old + adasum([param - old for param in params])
                for param in params:
                    param.copy_(new)

    def train(self, steps: int = STEPS, **options) -> None:
        for inputs, targets in batches(steps):
            self.step(share_loss(inputs, targets), **options)

    def check(self, tolerance: float = TOLERANCE) -> None:
        assert_same(self.model, self.twins[0], tolerance)


def share_loss(inputs: torch.Tensor, targets: torch.Tensor) -> Loss:
    return lambda module, rank: squares(module, share(inputs, rank), share(targets, rank))


def assert_trains_as_the_oracle(make=sgd, tolerance: float = TOLERANCE, **options) -> None:
    ranks = AllRanks(make, **options)
    ranks.train()
    ranks.check(tolerance)


def case_start():
    start()


def case_it_trains_as_the_algorithm_says():
    assert_trains_as_the_oracle(plain_sgd)
    assert_trains_as_the_oracle(functools.partial(sgd, nesterov=True, weight_decay=0.1))
    assert_trains_as_the_oracle(functools.partial(sgd, foreach=True))


def case_optimizers_with_state_of_their_own_do_as_well():
    for make in (
        functools.partial(torch.optim.Adam, lr=0.02),
        functools.partial(torch.optim.AdamW, lr=0.02, amsgrad=True, foreach=True),
        functools.partial(torch.optim.AdamW, lr=0.02, fused=True),
        functools.partial(torch.optim.RMSprop, lr=0.01, centered=True),
        functools.partial(torch.optim.Adagrad, lr=0.05),
        functools.partial(torch.optim.Adafactor, lr=0.05),
    ):
        assert_trains_as_the_oracle(make)


def case_groups_change_nothing():
    for groups in (1, 4):
        assert_trains_as_the_oracle(groups=groups)
    model = network()
    params = list(model.parameters())
    ranks = AllRanks(model=model, groups=[[params[5], params[0]], params[1:3]])
    assert ranks.optimizer._groups[0][1] is params[0]
    ranks.train(3)
    ranks.check()


def case_equal_changes_are_averaged_and_orthogonal_ones_added():
    for same in (True, False):
        param = nn.Parameter(torch.zeros(size()))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), op=Adasum)
        (param[0 if same else hvd.rank()] * -3.0).backward()
        optimizer.step()
        expected = [3.0] + [0.0] * (size() - 1) if same else [3.0] * size()
        assert param.tolist() == expected


def case_compressed_changes_are_close():
    for compression, tolerance in ((hvd.Compression.fp16, 2e-3), (hvd.Compression.bf16, 2e-2)):
        for groups in (None, 2):
            assert_trains_as_the_oracle(
                plain_sgd, tolerance, compression=compression, groups=groups
            )


def case_gradients_add_up_over_backward_passes():
    ranks = AllRanks(backward_passes_per_step=3)

    def step(passes: int) -> None:
        data = batches(passes)

        def loss(module, rank, number=0):
            return share_loss(*data[number])(module, rank)

        ranks.step(loss, passes)
        ranks.check()

    for passes in (3, 3, 2):
        step(passes)
    ranks.optimizer.set_backward_passes_per_step(2)
    step(2)
    step(1)


def case_reentrant_checkpoints_that_share_a_layer_are_one_pass():
    ranks = AllRanks(model=nn.Linear(5, 5), backward_passes_per_step=2)
    data = batches(2)

    def loss(module, rank, number):
        x = share(data[number][0], rank).requires_grad_()
        for _ in range(2):
            x = checkpoint(module, x, use_reentrant=True)
        return x.square().mean()

    for _ in range(2):
        ranks.step(loss, passes=2)
    ranks.check()


def case_one_backward_pass_too_many_is_refused_by_name():
    for passes in (1, 2):
        model = network()
        optimizer = distributed(model, op=Adasum, backward_passes_per_step=passes)
        inputs, targets = batches(1)[0]
        for _ in range(passes):
            squares(model, inputs, targets).backward()
        text = rf"'4\.\w+' .*per_step \({passes}\).*optimizer\.zero_grad\(\)"
        with pytest.raises(AssertionError, match=text):
            squares(model, inputs, targets).backward()
        optimizer.zero_grad()
        squares(model, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_equal_on_all_ranks(*model.parameters())


def case_zero_grad_between_passes_starts_over():
    model = network()
    optimizer = distributed(model, op=Adasum, backward_passes_per_step=2)
    inputs, targets = batches(1)[0]
    squares(model, inputs, targets).backward()
    optimizer.zero_grad()
    for _ in range(2):
        squares(model, inputs, targets).backward()
    optimizer.step()


def case_there_is_nothing_to_synchronize():
    model = network()
    optimizer = distributed(model, op=Adasum)
    inputs, targets = batches(1)[0]
    squares(model, share(inputs), share(targets)).backward()
    mine = [param.grad.clone() for param in model.parameters()]
    optimizer.synchronize()
    assert all(torch.equal(*pair) for pair in zip(mine, grads(model), strict=True))
    with (
        pytest.raises(AssertionError, match=r"skip_synchronize.*op=Adasum"),
        optimizer.skip_synchronize(),
    ):
        optimizer.step()
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(mine, grads(model), strict=True))


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in model.parameters()]


def case_gradients_may_be_clipped_before_the_step():
    def clip(module: nn.Module) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 0.05)

    ranks = AllRanks()
    ranks.train(after_backward=clip)
    ranks.check()


def case_ranks_may_run_different_branches_or_none():
    for options in ({}, {"groups": 2}):
        ranks = AllRanks(functools.partial(sgd, weight_decay=0.1), **options)
        for inputs, targets in batches():

            def loss(module, rank, inputs=inputs, targets=targets):
                if rank == 0:
                    return torch.zeros(())
                if rank == 1:
                    return module[:2](share(inputs, 1)).square().mean()
                return squares(module, share(inputs, rank), share(targets, rank))

            ranks.step(loss)
        ranks.check()


def case_frozen_parameters_may_thaw_and_freeze_again():
    model = network()
    model[0].requires_grad_(False)
    ranks = AllRanks(model=model)
    assert len(ranks.optimizer._requires_update) == 4
    for layer, live in ((0, False), (0, True), (2, False), (2, True)):
        for module in (model, *ranks.twins):
            module[layer].requires_grad_(live)
        ranks.train(2, set_to_none=False)  # momentum goes on while they are frozen
        ranks.check()


def case_parameter_groups_and_schedulers_work():
    def make(params) -> torch.optim.Optimizer:
        params = list(params)
        return torch.optim.SGD([{"params": params[:3], "lr": 0.01}, {"params": params[3:]}], lr=0.1)

    decay = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    for scheduler_first in (True, False):
        schedulers = []

        def make_scheduled(params, schedulers=schedulers) -> torch.optim.Optimizer:
            optimizer = make(params)
            schedulers.append(decay(optimizer))
            return optimizer

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ranks = AllRanks(make_scheduled if scheduler_first else make)
            if not scheduler_first:
                schedulers = [decay(each) for each in (*ranks.plains, ranks.optimizer)]
            for _ in range(4):
                ranks.train(1)
                for each in schedulers:
                    each.step()
        ranks.check()


def case_added_parameters_are_combined():
    ranks = AllRanks(lambda params: sgd([*params][:2]))
    pairs = [(ranks.model, ranks.optimizer), *zip(ranks.twins, ranks.plains, strict=True)]
    for layer in (2, 4):
        for module, optimizer in pairs:
            optimizer.add_param_group({"params": module[layer].parameters(), "lr": 0.01})
        ranks.train(2)
        ranks.check()


def case_state_survives_a_checkpoint_and_a_copy():
    ranks = AllRanks()
    ranks.train(2)
    ranks = copy.deepcopy(ranks)
    ranks.train(2)
    saved = copy.deepcopy((ranks.model.state_dict(), ranks.optimizer.state_dict()))
    ranks.model = network()
    ranks.optimizer = distributed(ranks.model, functools.partial(sgd, lr=9.0), op=Adasum)
    ranks.model.load_state_dict(saved[0])
    ranks.optimizer.load_state_dict(saved[1])
    ranks.train(2)
    ranks.check()


def case_loading_forgets_gradients():
    ranks = AllRanks()
    squares(ranks.model, *batches(1)[0]).backward()
    ranks.optimizer.load_state_dict(ranks.optimizer.state_dict())
    ranks.train(1)
    ranks.check()


def case_a_new_engine_forgets_backward_passes():
    ranks, loss = AllRanks(), share_loss(*batches(1)[0])
    for _ in range(2):
        loss(ranks.model, hvd.rank()).backward()
        hvd.shutdown()
        hvd.init()
    ranks.step(loss)
    ranks.check()


def case_another_optimizer_of_the_same_parameters_does_not_average_in_backward():
    ranks, loss = AllRanks(), share_loss(*batches(1)[0])
    other = distributed(ranks.model, plain_sgd)
    ranks.step(loss)
    ranks.check()
    other.zero_grad()
    loss(ranks.model, hvd.rank()).backward()
    other.synchronize()
    assert_equal_on_all_ranks(*grads(ranks.model))


def case_closures_run_on_each_rank_by_itself():
    for make in (
        sgd,
        functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=4),
        functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=5, line_search_fn="strong_wolfe"),
    ):
        ranks = AllRanks(make)

        def closure(module, optimizer, loss, rank):
            optimizer.zero_grad()
            value = loss(module, rank)
            value.backward()
            return value

        for inputs, targets in batches(3):
            step = functools.partial(functools.partial, closure)
            loss = share_loss(inputs, targets)
            before = [param.detach().clone() for param in ranks.model.parameters()]
            mine = ranks.optimizer.step(step(ranks.model, ranks.optimizer, loss, hvd.rank()))
            losses = [
                plain.step(step(twin, plain, loss, rank))
                for rank, (twin, plain) in enumerate(zip(ranks.twins, ranks.plains, strict=True))
            ]
            ranks.combine(before)
            torch.testing.assert_close(mine, losses[hvd.rank()], rtol=1e-7, atol=0)
        ranks.check(1e-7)  # L-BFGS divides by differences


def case_step_hooks_are_called_once_around_it_all():
    model = network()
    optimizer = distributed(model, op=Adasum)
    seen: list[torch.Tensor] = []

    def note(*_: object) -> None:
        seen.append(model[0].weight.detach().clone())

    optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(note)
    train(model, optimizer, batches(2))
    assert len(seen) == 4
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[1], seen[2])
    assert_equal_on_all_ranks(*seen)


def case_a_scaler_makes_all_ranks_skip_the_same_steps():
    for unscale in (True, False):
        ranks = AllRanks(model=network().float())
        optimizer = ranks.optimizer
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        for step, (inputs, targets) in enumerate(batches()):
            loss = share_loss(inputs.float(), targets.float())
            overflows = step in (1, 4)
            poison = float("inf") if overflows and hvd.rank() == size() - 1 else 1.0
            optimizer.zero_grad()
            scaler.scale(loss(ranks.model, hvd.rank()) * poison).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if not overflows:
                ranks.step(loss, twins_only=True)
            assert scaler.get_scale() == 1024 / 2 ** sum(step >= at for at in (1, 4))
            ranks.check(1e-5)  # float32


def case_odd_tensors_are_parameters_too():
    for options in ({}, {"groups": 1}):
        params = [
            nn.Parameter(torch.tensor(0.0)),
            nn.Parameter(torch.zeros(0, 3)),
            nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)),
            nn.Parameter(torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)),
        ]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), op=Adasum, **options)
        for param in params:
            param.sum().backward()
        optimizer.step()
        for param in params:
            assert torch.equal(param, torch.full_like(param, -1.0))


def case_sparse_gradients_make_dense_changes():
    ranks = AllRanks(torch.optim.SparseAdam, nn.Embedding(10, 4, sparse=True))
    for _ in range(3):
        words = torch.randint(0, 10, (24,))

        def loss(module, rank, words=words):
            return module(share(words, rank)).square().mean()

        ranks.step(loss)
    ranks.check()


def case_a_step_that_fails_leaves_the_parameters_as_they_were():
    for options in ({}, {"groups": 2}):
        model = network()
        before = copy.deepcopy(model)
        optimizer = distributed(model, op=Adasum, compression=Careless, **options)
        inputs, targets = batches(1)[0]
        squares(model, inputs, targets).backward()
        with Careless.on(0), pytest.raises(MismatchError, match=r"2\.weight"):
            optimizer.step()
        assert_same(model, before, 0)
        optimizer.zero_grad()
        train(model, optimizer, batches(1))
        assert_equal_on_all_ranks(*model.parameters())


def case_compiled_steps_work():
    ranks = AllRanks()

    @functools.partial(torch.compile, backend="aot_eager")
    def step(inputs, targets):
        ranks.optimizer.zero_grad()
        squares(ranks.model, inputs, targets).backward()
        ranks.optimizer.step()

    for inputs, targets in batches(3):
        step(share(inputs), share(targets))
        ranks.step(share_loss(inputs, targets), twins_only=True)
    ranks.check()


def case_it_is_still_an_instance_of_its_class():
    model = network()
    optimizer = distributed(model, op=Adasum)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert list(optimizer._parameter_names.values()) == [n for n, _ in model.named_parameters()]
    squares(model, *batches(1)[0]).backward()
    assert optimizer._handles == dict.fromkeys(model.parameters(), (None, None))
    optimizer.step()
    assert optimizer._handles == {}


test_on_ranks = session.on_ranks(globals(), 2, 4, push=[2], session="torch")
