"""DistributedOptimizer with op=Adasum does what its paper says, which is computed here anew.

Every rank knows the whole batch and keeps a twin of the model and of the plain optimizer for each
rank: the twins step with the shares of their ranks, and what they have changed is combined by
`adasum` below.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable

import pytest
import session
import torch
from test_torch_optimizer import (
    assert_equal_on_all_ranks,
    assert_same,
    batches,
    network,
    plain_sgd,
    sgd,
    share,
    squares,
    start,
    train,
    train_alone,
)
from torch import nn

import hororing.torch as hvd
from hororing.arguments import Adasum
from hororing.errors import MismatchError
from hororing.process_sets import ProcessSet, register, unregister
from hororing.runtime import size

# Sums of products in another order, which optimizers that divide by small differences amplify.
TOLERANCE = 1e-7
Loss = Callable[[nn.Module, int], torch.Tensor]


def works() -> bool:
    return size() in (2, 4)


def adasum(parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    a, b = adasum(parts[:half]), adasum(parts[half:])
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    left = 1 - dot / (2 * aa) if aa > 0 else 1.0
    right = 1 - dot / (2 * bb) if bb > 0 else 1.0
    return left * a + right * b


class Oracle:
    """One twin for each rank."""

    def __init__(self, model: nn.Module, make) -> None:
        self.models = [copy.deepcopy(model) for _ in range(size())]
        self.optimizers = [make(twin) for twin in self.models]

    def step(
        self, loss: Loss, passes: int = 1, after_backward=lambda twin: None, set_to_none=True
    ) -> None:
        before = [param.detach().clone() for param in self.models[0].parameters()]
        for rank, (twin, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad(set_to_none)
            for number in range(passes):
                value = loss(twin, rank) if passes == 1 else loss(twin, rank, number)
                if value.requires_grad:
                    value.backward()
            after_backward(twin)
            optimizer.step()
        self.combine(before)

    def combine(self, before: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for old, *params in zip(before, *(m.parameters() for m in self.models), strict=True):
                new = old + adasum([param - old for param in params])
                for param in params:
                    param.copy_(new)


def of_module(make):
    return lambda module: make(module.parameters())


def distributed(model: nn.Module, make, **options) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), op=Adasum, **options
    )


def share_loss(inputs: torch.Tensor, targets: torch.Tensor) -> Loss:
    return lambda module, rank: squares(module, share(inputs, rank), share(targets, rank))


def assert_trains_as_the_oracle(make, **options) -> None:
    model = network()
    oracle = Oracle(model, of_module(make))
    optimizer = distributed(model, make, **options)
    for inputs, targets in batches():
        train(model, optimizer, [(inputs, targets)])
        oracle.step(share_loss(inputs, targets))
    assert_same(model, oracle.models[0], TOLERANCE)


def case_start():
    start()


def case_one_rank_trains_as_without_it():
    if size() > 1:
        return
    model = network()
    twin = copy.deepcopy(model)
    data = batches()
    optimizer = distributed(model, sgd)
    train(model, optimizer, data)
    train_alone(twin, sgd(twin.parameters()), data)
    assert_same(model, twin, 0)
    with optimizer.skip_synchronize():
        optimizer.step()


def case_other_numbers_of_ranks_are_refused():
    model = network()
    if size() == 3:
        optimizer = sgd(model.parameters())
        with pytest.raises(NotImplementedError, match="power of two, not 3"):
            hvd.DistributedOptimizer(optimizer, op=Adasum)
        assert type(optimizer) is torch.optim.SGD


def case_process_sets_and_predivide_are_refused():
    optimizer = sgd(network().parameters())
    if size() > 1:
        everyone_but_the_last = register(ProcessSet(range(size() - 1)))
        with pytest.raises(NotImplementedError, match="not in a process set"):
            hvd.DistributedOptimizer(optimizer, op=Adasum, process_set=everyone_but_the_last)
        unregister(everyone_but_the_last)
    with pytest.raises(ValueError, match="op=Average only"):
        hvd.DistributedOptimizer(optimizer, op=Adasum, gradient_predivide_factor=2.0)
    assert type(optimizer) is torch.optim.SGD


def case_it_trains_as_the_algorithm_says():
    if not works():
        return
    assert_trains_as_the_oracle(plain_sgd)
    assert_trains_as_the_oracle(functools.partial(sgd, nesterov=True, weight_decay=0.1))
    assert_trains_as_the_oracle(functools.partial(sgd, foreach=True))


def case_optimizers_with_state_of_their_own_do_as_well():
    if not works():
        return
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
    if not works():
        return
    for groups in (1, 4):
        assert_trains_as_the_oracle(sgd, groups=groups)
    model = network()
    params = list(model.parameters())
    oracle = Oracle(model, of_module(sgd))
    optimizer = distributed(model, sgd, groups=[[params[5], params[0]], params[1:3]])
    assert optimizer._groups[0][1] is params[0]
    for inputs, targets in batches(3):
        train(model, optimizer, [(inputs, targets)])
        oracle.step(share_loss(inputs, targets))
    assert_same(model, oracle.models[0], TOLERANCE)


def case_equal_changes_are_averaged_and_orthogonal_ones_added():
    if not works():
        return
    for same in (True, False):
        param = nn.Parameter(torch.zeros(size()))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), op=Adasum)
        (param[0 if same else hvd.rank()] * -3.0).backward()
        optimizer.step()
        expected = [3.0] + [0.0] * (size() - 1) if same else [3.0] * size()
        assert param.tolist() == expected


def case_compressed_changes_are_close():
    if not works():
        return
    for compression, tolerance in ((hvd.Compression.fp16, 2e-3), (hvd.Compression.bf16, 2e-2)):
        for groups in (None, 2):
            model = network()
            oracle = Oracle(model, of_module(plain_sgd))
            optimizer = distributed(model, plain_sgd, compression=compression, groups=groups)
            for inputs, targets in batches():
                train(model, optimizer, [(inputs, targets)])
                oracle.step(share_loss(inputs, targets))
            assert_same(model, oracle.models[0], tolerance)


def case_gradients_add_up_over_backward_passes():
    if not works():
        return
    model = network()
    oracle = Oracle(model, of_module(sgd))
    optimizer = distributed(model, sgd, backward_passes_per_step=3)

    def step(passes: int) -> None:
        data = batches(passes)
        optimizer.zero_grad()
        for inputs, targets in data:
            squares(model, share(inputs), share(targets)).backward()
        optimizer.step()

        def loss(module, rank, number=0):
            inputs, targets = data[number]
            return squares(module, share(inputs, rank), share(targets, rank))

        oracle.step(loss, passes)
        assert_same(model, oracle.models[0], TOLERANCE)

    for passes in (3, 3, 2):
        step(passes)
    optimizer.set_backward_passes_per_step(2)
    step(2)
    step(1)


def case_one_backward_pass_too_many_is_refused_by_name():
    if not works():
        return
    for passes in (1, 2):
        model = network()
        optimizer = distributed(model, sgd, backward_passes_per_step=passes)
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
    if not works():
        return
    model = network()
    optimizer = distributed(model, sgd, backward_passes_per_step=2)
    inputs, targets = batches(1)[0]
    squares(model, inputs, targets).backward()
    optimizer.zero_grad()
    for _ in range(2):
        squares(model, inputs, targets).backward()
    optimizer.step()


def case_there_is_nothing_to_synchronize():
    if not works():
        return
    model = network()
    optimizer = distributed(model, sgd)
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
    if not works():
        return
    model = network()
    oracle = Oracle(model, of_module(sgd))
    optimizer = distributed(model, sgd)

    def clip(module: nn.Module) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 0.05)

    for inputs, targets in batches():
        optimizer.zero_grad()
        squares(model, share(inputs), share(targets)).backward()
        clip(model)
        optimizer.step()
        oracle.step(share_loss(inputs, targets), after_backward=clip)
    assert_same(model, oracle.models[0], TOLERANCE)


def case_ranks_may_run_different_branches_or_none():
    if not works():
        return
    for options in ({}, {"groups": 2}):
        model = network()
        oracle = Oracle(model, of_module(functools.partial(sgd, weight_decay=0.1)))
        optimizer = distributed(model, functools.partial(sgd, weight_decay=0.1), **options)
        for inputs, targets in batches():

            def loss(module, rank, inputs=inputs, targets=targets):
                if rank == 0:
                    return torch.zeros(())
                if rank == 1:
                    return module[:2](share(inputs, 1)).square().mean()
                return squares(module, share(inputs, rank), share(targets, rank))

            optimizer.zero_grad()
            value = loss(model, hvd.rank())
            if value.requires_grad:
                value.backward()
            optimizer.step()
            oracle.step(loss)
        assert_same(model, oracle.models[0], TOLERANCE)


def case_frozen_parameters_may_thaw_and_freeze_again():
    if not works():
        return
    model = network()
    model[0].requires_grad_(False)
    oracle = Oracle(model, of_module(sgd))
    optimizer = distributed(model, sgd)
    assert len(optimizer._requires_update) == 4
    for layer, live in ((0, False), (0, True), (2, False), (2, True)):
        for module in (model, *oracle.models):
            module[layer].requires_grad_(live)
        for inputs, targets in batches(2):
            optimizer.zero_grad(set_to_none=False)  # momentum goes on while they are frozen
            squares(model, share(inputs), share(targets)).backward()
            optimizer.step()
            oracle.step(share_loss(inputs, targets), set_to_none=False)
        assert_same(model, oracle.models[0], TOLERANCE)


def case_parameter_groups_and_schedulers_work():
    if not works():
        return

    def make(module: nn.Module) -> torch.optim.Optimizer:
        params = list(module.parameters())
        return torch.optim.SGD([{"params": params[:3], "lr": 0.01}, {"params": params[3:]}], lr=0.1)

    for scheduler_first in (True, False):
        model = network()
        oracle = Oracle(model, make)
        optimizer = make(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            decay = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
            if scheduler_first:
                scheduler = decay(optimizer)
            hvd.DistributedOptimizer(optimizer, op=Adasum)
            if not scheduler_first:
                scheduler = decay(optimizer)
            schedulers = [scheduler, *map(decay, oracle.optimizers)]
            for inputs, targets in batches(4):
                train(model, optimizer, [(inputs, targets)])
                oracle.step(share_loss(inputs, targets))
                for each in schedulers:
                    each.step()
        assert_same(model, oracle.models[0], TOLERANCE)


def case_added_parameters_are_combined():
    if not works():
        return
    model = network()
    oracle = Oracle(model, lambda module: sgd(module[0].parameters()))
    optimizer = hvd.DistributedOptimizer(
        sgd(model[0].parameters()), model.named_parameters(), op=Adasum
    )
    for layer in (2, 4):
        optimizer.add_param_group({"params": model[layer].parameters(), "lr": 0.01})
        for twin, plain in zip(oracle.models, oracle.optimizers, strict=True):
            plain.add_param_group({"params": twin[layer].parameters(), "lr": 0.01})
        for inputs, targets in batches(2):
            model.zero_grad()
            train(model, optimizer, [(inputs, targets)])
            for twin in oracle.models:
                twin.zero_grad()
            oracle.step(share_loss(inputs, targets))
        assert_same(model, oracle.models[0], TOLERANCE)


def case_state_survives_a_checkpoint_and_a_copy():
    if not works():
        return
    model = network()
    oracle = Oracle(model, of_module(sgd))
    optimizer = distributed(model, sgd)
    for turn, (inputs, targets) in enumerate(batches(6)):
        train(model, optimizer, [(inputs, targets)])
        oracle.step(share_loss(inputs, targets))
        if turn == 1:
            model, optimizer = copy.deepcopy((model, optimizer))
        if turn == 3:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = network()
            optimizer = distributed(model, functools.partial(sgd, lr=9.0))
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    assert_same(model, oracle.models[0], TOLERANCE)


def case_loading_forgets_gradients():
    if not works():
        return
    model = network()
    optimizer = distributed(model, sgd)
    inputs, targets = batches(1)[0]
    squares(model, inputs, targets).backward()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    train(model, optimizer, batches(1))
    assert_equal_on_all_ranks(*model.parameters())


def case_closures_run_on_each_rank_by_itself():
    if not works():
        return
    for make in (
        sgd,
        functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=4),
        functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=5, line_search_fn="strong_wolfe"),
    ):
        model = network()
        oracle = Oracle(model, of_module(make))
        optimizer = distributed(model, make)

        def closure(module, plain, loss, rank):
            plain.zero_grad()
            value = loss(module, rank)
            value.backward()
            return value

        for inputs, targets in batches(3):
            loss = share_loss(inputs, targets)
            before = [param.detach().clone() for param in model.parameters()]
            mine = optimizer.step(functools.partial(closure, model, optimizer, loss, hvd.rank()))
            losses = [
                plain.step(functools.partial(closure, twin, plain, loss, rank))
                for rank, (twin, plain) in enumerate(
                    zip(oracle.models, oracle.optimizers, strict=True)
                )
            ]
            oracle.combine(before)
            torch.testing.assert_close(mine, losses[hvd.rank()], rtol=1e-7, atol=0)
        assert_same(model, oracle.models[0], 1e-7)  # L-BFGS divides by differences


def case_step_hooks_are_called_once_around_it_all():
    if not works():
        return
    model = network()
    optimizer = distributed(model, sgd)
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
    if not works():
        return
    for unscale in (True, False):
        model = network().float()
        oracle = Oracle(model, of_module(sgd))
        optimizer = distributed(model, sgd)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        for step, (inputs, targets) in enumerate(batches()):
            inputs, targets = inputs.float(), targets.float()
            overflows = step in (1, 4)
            poison = float("inf") if overflows and hvd.rank() == size() - 1 else 1.0
            optimizer.zero_grad()
            loss = squares(model, share(inputs), share(targets))
            scaler.scale(loss * poison).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if not overflows:
                oracle.step(share_loss(inputs, targets))
            assert scaler.get_scale() == 1024 / 2 ** sum(step >= at for at in (1, 4))
            assert_same(model, oracle.models[0], 1e-5)  # float32


def case_odd_tensors_are_parameters_too():
    if not works():
        return
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
    if not works():
        return
    model = nn.Embedding(10, 4, sparse=True)
    oracle = Oracle(model, of_module(torch.optim.SparseAdam))
    optimizer = distributed(model, torch.optim.SparseAdam)
    for _ in range(3):
        words = torch.randint(0, 10, (24,))

        def loss(module, rank, words=words):
            return module(share(words, rank)).square().mean()

        optimizer.zero_grad()
        loss(model, hvd.rank()).backward()
        optimizer.step()
        oracle.step(loss)
    assert_same(model, oracle.models[0], TOLERANCE)


class Careless(hvd.Compression.none):
    """Sends another type on rank 0."""

    broken = True

    @classmethod
    def compress(cls, tensor):
        broken = cls.broken and hvd.rank() == 0 and tensor.shape == (6, 7)
        return (tensor.float() if broken else tensor), None


def case_a_step_that_fails_leaves_the_parameters_as_they_were():
    if not works():
        return
    for options in ({}, {"groups": 2}):
        model = network()
        before = copy.deepcopy(model)
        optimizer = distributed(model, sgd, compression=Careless, **options)
        Careless.broken = True
        inputs, targets = batches(1)[0]
        squares(model, inputs, targets).backward()
        with pytest.raises(MismatchError, match=r"2\.weight"):
            optimizer.step()
        assert_same(model, before, 0)
        Careless.broken = False
        optimizer.zero_grad()
        train(model, optimizer, batches(1))
        assert_equal_on_all_ranks(*model.parameters())


def case_compiled_steps_work():
    if not works():
        return
    model = network()
    oracle = Oracle(model, of_module(sgd))
    optimizer = distributed(model, sgd)

    @functools.partial(torch.compile, backend="aot_eager")
    def step(inputs, targets):
        optimizer.zero_grad()
        squares(model, inputs, targets).backward()
        optimizer.step()

    for inputs, targets in batches(3):
        step(share(inputs), share(targets))
        oracle.step(share_loss(inputs, targets))
    assert_same(model, oracle.models[0], TOLERANCE)


def case_it_is_still_an_instance_of_its_class():
    if not works():
        return
    model = network()
    optimizer = distributed(model, sgd)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert list(optimizer._parameter_names.values()) == [n for n, _ in model.named_parameters()]
    squares(model, *batches(1)[0]).backward()
    assert optimizer._handles == dict.fromkeys(model.parameters(), (None, None))
    optimizer.step()
    assert optimizer._handles == {}


test_on_ranks = session.on_ranks(globals(), 1, 2, 3, 4, push=[2], session="torch")
