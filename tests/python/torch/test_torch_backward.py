"""Gradients are reduced when backward() returns, so loops may use them before step().

Each loop trains on N ranks and, with a twin of its model, in one process on the whole batch.
"""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections.abc import Callable

import pytest
import session
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_training import (
    Careless,
    assert_equal_on_all_ranks,
    assert_same,
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
from hororing.torch import MismatchError

Part = Callable[[torch.Tensor], torch.Tensor]  # returns a part of a batch
Loop = Callable[[nn.Module, list[torch.optim.Optimizer], Part], None]


def case_start() -> None:
    start()


def assert_same_gradients(model: nn.Module, twin: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def as_it_is(batch: torch.Tensor) -> torch.Tensor:
    return batch


def assert_as_alone(model: nn.Module, loop: Loop, make: Callable = sgd, **options) -> None:
    """Compare `loop` with one process. It takes a model, an optimizer per child, and a `Part`."""
    twin = copy.deepcopy(model)
    optimizers = [
        distributed(child, make, f"{name}.", **options) for name, child in model.named_children()
    ]
    plains = [make(child.parameters()) for child in twin.children()]
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop(model, optimizers, share)
        torch.set_rng_state(state)
        loop(twin, plains, as_it_is)
    assert_same(model, twin)


# ---------------------------------------------------------------------------------------------
# Loops written for one process


def case_gan() -> None:
    """The loop of PyTorch's DCGAN example: two passes per step, and a pass through both models."""

    def loop(model: nn.Module, optimizers: list[torch.optim.Optimizer], part: Part) -> None:
        judge, maker = model["judge"], model["maker"]
        criterion = nn.BCEWithLogitsLoss()
        for data, noise in zip(batches(4), batches(4), strict=True):
            real, noise = part(data[0]), part(noise[0])
            ones, zeros = torch.ones(len(real), 3), torch.zeros(len(real), 3)
            judge.zero_grad()
            criterion(judge(real), ones).backward()
            fake = maker(noise)
            criterion(judge(fake.detach()), zeros).backward()
            optimizers[0].step()
            maker.zero_grad()
            criterion(judge(fake), ones).backward()
            optimizers[1].step()

    model = nn.ModuleDict({"judge": network(), "maker": nn.Sequential(nn.Linear(5, 5), nn.Tanh())})
    assert_as_alone(model, loop)


def case_clipping_and_norms() -> None:
    norms: list[torch.Tensor] = []

    def loop(model: nn.Module, optimizers: list[torch.optim.Optimizer], part: Part) -> None:
        for inputs, targets in batches():
            optimizers[0].zero_grad()
            squares(model[0], part(inputs), part(targets)).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            optimizers[0].step()

    for options in ({}, {"groups": 2}, {"compression": Careless}):
        norms.clear()
        assert_as_alone(nn.Sequential(network()), loop, **options)
        mine, theirs = torch.stack(norms).reshape(2, -1)
        assert (mine > 0.05).all()
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)


def case_a_trainer_that_accumulates() -> None:
    """Four backward passes per step, unknown to the optimizer; then clipping."""

    def loop(model: nn.Module, optimizers: list[torch.optim.Optimizer], part: Part) -> None:
        (optimizer,) = optimizers
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        model.zero_grad()
        for at, (inputs, targets) in enumerate(batches(12), 1):
            (squares(model[0], part(inputs), part(targets)) / 4).backward()
            if at % 4 == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                model.zero_grad()

    assert_as_alone(nn.Sequential(network()), loop, torch.optim.AdamW)


def case_gradients_may_be_reset_before_a_step() -> None:
    def loop(model: nn.Module, optimizers: list[torch.optim.Optimizer], part: Part) -> None:
        for at, (inputs, targets) in enumerate(batches()):
            squares(model[0], part(inputs), part(targets)).backward()
            if at % 2:
                optimizers[0].step()
            optimizers[0].zero_grad()

    for op in (hvd.Average, hvd.Sum) if hvd.size() == 1 else (hvd.Average,):
        assert_as_alone(nn.Sequential(network()), loop, op=op)


def case_a_scaler_that_accumulates() -> None:
    def loop(model: nn.Module, optimizers: list[torch.optim.Optimizer], part: Part) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for first, second in zip(batches(3), batches(3), strict=True):
            optimizers[0].zero_grad()
            for inputs, targets in (first, second):
                scaler.scale(squares(model[0], part(inputs), part(targets))).backward()
            scaler.unscale_(optimizers[0])
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizers[0])
            scaler.update()

    assert_as_alone(nn.Sequential(network()), loop)


def case_a_gradient_penalty() -> None:
    """torch.autograd.grad runs no hooks, and its result is differentiated again."""

    def loop(model: nn.Module, optimizers: list[torch.optim.Optimizer], part: Part) -> None:
        for inputs, targets in batches(3):
            optimizers[0].zero_grad()
            given = part(inputs).clone().requires_grad_()
            loss = squares(model[0], given, part(targets))
            (slope,) = torch.autograd.grad(
                model[0](given).sum(), given, create_graph=True, retain_graph=True
            )
            loss.backward(retain_graph=True)
            slope.square().sum(dim=1).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizers[0].step()

    assert_as_alone(nn.Sequential(network()), loop)


# ---------------------------------------------------------------------------------------------
# The end of a backward pass


def case_reentrant_checkpoints_that_share_a_layer() -> None:
    """Each checkpoint produces the layer's gradient once, with or without a layer around them."""

    class Twice(nn.Module):
        def __init__(self, around: bool, reentrant: bool) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
            self.before = nn.Linear(5, 5) if around else nn.Identity()
            self.after = nn.Linear(5, 3) if around else nn.Identity()
            self.reentrant = reentrant

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.before(x.clone().requires_grad_())
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
            return self.after(x)

    def loop(model: nn.Module, optimizers: list[torch.optim.Optimizer], part: Part) -> None:
        passes = getattr(optimizers[0], "backward_passes_per_step", options.get(PASSES, 1))
        data = batches(3 * passes)
        for first in range(0, len(data), passes):
            optimizers[0].zero_grad()
            for inputs, _ in data[first : first + passes]:
                model[0](part(inputs)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizers[0].step()

    for around in (False, True):
        for reentrant in (True, False):
            for options in ({}, {PASSES: 2}, {"groups": 2}):
                assert_as_alone(nn.Sequential(Twice(around, reentrant)), loop, **options)


PASSES = "backward_passes_per_step"


def case_a_gradient_that_begins_to_come_twice_is_named() -> None:
    if hvd.size() == 1:
        return
    layer = nn.Linear(300, 300)  # so large that it is sent immediately
    optimizer = distributed(layer)

    def backward(times: int) -> torch.Tensor:
        x = torch.ones(1, 300, requires_grad=True)
        for _ in range(times):
            x = checkpoint(layer, x, use_reentrant=True)
        x.mean().backward()
        return x

    backward(1)
    optimizer.zero_grad()
    with pytest.raises(AssertionError, match=r"'(weight|bias)' was accumulated again"):
        backward(2)
    with pytest.raises(AssertionError, match="was not finished on this rank"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="was changed while it was being reduced"):
        optimizer.synchronize()
    optimizer.zero_grad()
    twin = copy.deepcopy(layer)
    layer_of, layer = layer, twin
    backward(2)
    layer = layer_of
    backward(2)
    assert_same_gradients(layer, twin)


def case_passes_of_several_threads_are_counted() -> None:
    if hvd.size() == 1:
        return
    model = network()
    optimizer = distributed(model)
    barrier = threading.Barrier(2)
    failures = []

    def meet(_: torch.Tensor) -> None:
        barrier.wait()

    def backward(part: nn.Module, width: int) -> None:
        x = torch.ones(2, width, requires_grad=True) * 1.0
        x.register_hook(meet)  # both threads are in backward
        try:
            part(x).sum().backward()
        except AssertionError as error:
            failures.append(str(error))

    for passes in (1, 2):
        optimizer.set_backward_passes_per_step(passes)
        threads = [
            threading.Thread(target=backward, args=each) for each in ((model[0], 5), (model[2], 7))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if passes == 1:
            assert len(failures) == 2
            assert "several threads at once; pass backward_passes_per_step" in failures[0]
        optimizer.step()
        optimizer.zero_grad()
    assert len(failures) == 2


# ---------------------------------------------------------------------------------------------
# Other operations; ranks that differ; errors


def case_sums_are_not_summed_again() -> None:
    model = network()
    optimizer = distributed(model, op=hvd.Sum)
    inputs, targets = batches(1)[0]
    for reset in (optimizer.zero_grad, optimizer.step):
        squares(model, inputs, targets).backward()
        if hvd.size() > 1:
            with pytest.raises(AssertionError, match=r"op=Sum.*optimizer\.zero_grad\(\)"):
                squares(model, inputs, targets).backward()
        reset()
        model.zero_grad()
    squares(model, inputs, targets).backward()
    optimizer.step()


def case_adasum_in_a_gan() -> None:
    """The loop follows the error's advice: counted passes, and zero_grad() of the optimizer."""
    if hvd.size() != 2:
        return
    judge, maker = network(), nn.Linear(5, 5)
    optimizer = distributed(judge, op=hvd.Adasum, backward_passes_per_step=2)
    other = distributed(maker, op=hvd.Adasum)
    for inputs, _ in batches(3):
        optimizer.zero_grad()
        judge(share(inputs)).mean().backward()
        judge(maker(share(inputs)).detach()).mean().backward()
        optimizer.step()
        other.zero_grad()
        judge(maker(share(inputs))).mean().backward()
        other.step()
    assert_equal_on_all_ranks(*judge.parameters(), *maker.parameters())


def case_ranks_that_go_backward_through_other_networks_meet_in_steps() -> None:
    """Each pass sends its gradients of all optimizers before it waits for any of them."""
    for alone in range(2):
        models = nn.ModuleList(network() for _ in range(2))
        twins = copy.deepcopy(models)
        optimizers = [distributed(model, plain_sgd, f"{n}.") for n, model in enumerate(models)]
        plains = [plain_sgd(twin.parameters()) for twin in twins]
        for inputs, targets in batches(3):

            def loss(pair: nn.ModuleList, rank: int, inputs=inputs, targets=targets, only=alone):
                used = [pair[only]] if rank == 0 else reversed(pair) if rank == 1 else pair
                return sum(
                    squares(each, share(inputs, rank), share(targets, rank)) for each in used
                )

            loss(models, hvd.rank()).backward()
            for rank in range(hvd.size()):
                (loss(twins, rank) / hvd.size()).backward()
            for each in (*optimizers, *plains):
                each.step()
                each.zero_grad()
        assert_same(models, twins)


def case_a_rank_without_a_batch_need_not_go_backward() -> None:
    model = network()
    twin = copy.deepcopy(model)
    optimizer, plain = distributed(model), sgd(twin.parameters())
    for turn, (inputs, targets) in enumerate(batches(4)):
        optimizer.zero_grad()
        plain.zero_grad()
        for rank in range(hvd.size()):
            if rank != turn % hvd.size() or hvd.size() == 1:
                (squares(twin, share(inputs, rank), share(targets, rank)) / hvd.size()).backward()
        if hvd.rank() != turn % hvd.size() or hvd.size() == 1:
            squares(model, share(inputs), share(targets)).backward()
        else:
            optimizer.synchronize()  # before it uses gradients
        assert_same_gradients(model, twin)
        with optimizer.skip_synchronize():
            optimizer.step() if turn % 2 else optimizer.step(lambda: 1.0)
        plain.step()
    assert_same(model, twin)


class Refusing(torch.autograd.Function):
    refuses = False

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        if Refusing.refuses:
            raise RuntimeError("refused")
        return gradient


def case_a_backward_pass_that_fails_is_told_of_and_can_be_made_good() -> None:
    if hvd.size() == 1:
        return
    model = network()
    optimizer = distributed(model)
    before = copy.deepcopy(model)

    def backward(fails: bool = False) -> None:
        Refusing.refuses = fails
        model[2:](Refusing.apply(model[:2](torch.ones(2, 5)))).sum().backward()

    backward()
    optimizer.zero_grad()
    for recover in (optimizer.synchronize, optimizer.step):
        for spoils in (False, True):
            if hvd.rank() == 0:
                with pytest.raises(RuntimeError, match="refused"):
                    backward(fails=True)
                for call in (optimizer.zero_grad, backward)[: 1 + spoils]:
                    text = r"gradients, '.*optimizer\.synchronize"
                    with pytest.raises(AssertionError, match=text):
                        call()
                # The others wait for this rank in backward().
                if spoils:
                    with pytest.raises(AssertionError, match="was changed while it was being"):
                        recover()
                else:
                    recover()
            else:
                backward()
                if recover == optimizer.step and not spoils:
                    optimizer.step()
            if not spoils:
                assert_equal_on_all_ranks(*(param.grad for param in model.parameters()))
            optimizer.zero_grad()
    assert not torch.equal(before[0].weight, model[0].weight)
    backward()
    optimizer.step()
    assert_equal_on_all_ranks(*model.parameters())


def case_a_first_pass_that_fails_leaves_nothing_to_make_good() -> None:
    model = network()
    optimizer = distributed(model)
    for fails in (True, False):
        Refusing.refuses = fails
        loss = model[2:](Refusing.apply(model[:2](torch.ones(2, 5)))).sum()
        if fails:
            with pytest.raises(RuntimeError, match="refused"):
                loss.backward()
            optimizer.zero_grad()
        else:
            loss.backward()
    optimizer.step()


def case_an_error_of_one_optimizer_leaves_the_other_one_reduced() -> None:
    if hvd.size() == 1:
        return
    models = [network(), network()]
    twins = copy.deepcopy(models)
    kinds = Careless, hvd.Compression.none
    optimizers = [
        distributed(model, prefix=f"{at}.", compression=kinds[at])
        for at, model in enumerate(models)
    ]
    for turn, (inputs, targets) in enumerate(batches(4)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = sum(squares(model, share(inputs), share(targets)) for model in models)
        if turn % 2:
            with Careless.on(0), pytest.raises(MismatchError, match=r"2\.weight"):
                loss.backward()
        else:
            loss.backward()
        for twin in twins:
            twin.zero_grad()
            squares(twin, inputs, targets).backward()
        assert_same_gradients(models[1], twins[1])


# ---------------------------------------------------------------------------------------------
# Parameters of several optimizers


def case_the_newest_of_two_optimizers_reduces_what_they_share() -> None:
    for op in (hvd.Average, hvd.Sum):
        model = network()
        twin = copy.deepcopy(model)
        old = distributed(model, op=op)  # unused, but still alive
        new = distributed(model[2:], plain_sgd, "new.", op=op)
        plain = plain_sgd(twin[2:].parameters())
        for inputs, targets in batches(3):
            squares(model, share(inputs), share(targets)).backward()
            (squares(twin, inputs, targets) * (hvd.size() if op == hvd.Sum else 1)).backward()
            assert_same_gradients(model, twin)
            new.step()
            plain.step()
            for each in (old, new, plain):
                each.zero_grad()
            model.zero_grad()
            twin.zero_grad()
        assert_same(model, twin)
        del new
        gc.collect()
        squares(model, share(inputs), share(targets)).backward()
        (squares(twin, inputs, targets) * (hvd.size() if op == hvd.Sum else 1)).backward()
        assert_same_gradients(model, twin)


def case_two_optimizers_that_share_take_turns() -> None:
    """The older one steps with the newer one's results, even on ranks without a gradient."""
    body, heads = nn.Linear(5, 4), [nn.Linear(4, 3), nn.Linear(4, 3)]
    twins = copy.deepcopy([body, *heads])

    def make(parts: list[nn.Module], wrap: Callable) -> list[torch.optim.Optimizer]:
        modules = [nn.Sequential(parts[0], part) for part in parts[1:]]
        return [wrap(each, at) for at, each in enumerate(modules)]

    optimizers = make([body, *heads], lambda each, at: distributed(each, plain_sgd, f"{at}."))
    plains = make(twins, lambda each, _: plain_sgd(each.parameters()))
    for turn, (inputs, targets) in enumerate(batches(6)):
        at = turn % 2
        optimizers[at].zero_grad()
        plains[at].zero_grad()
        idle = turn % hvd.size() if turn > 1 and hvd.size() > 1 else -1
        for rank in range(hvd.size()):
            if rank != idle:
                loss = squares(
                    nn.Sequential(twins[0], twins[1 + at]),
                    share(inputs, rank),
                    share(targets, rank),
                )
                (loss / hvd.size()).backward()
        if hvd.rank() != idle:
            squares(nn.Sequential(body, heads[at]), share(inputs), share(targets)).backward()
        optimizers[at].step()
        plains[at].step()
    assert_same(nn.ModuleList([body, *heads]), nn.ModuleList(twins))


def case_optimizers_that_reduce_what_they_share_differently_do_so_in_steps() -> None:
    if hvd.size() == 1:
        return
    model = network()
    total, mean = (distributed(model, plain_sgd, op=op) for op in (hvd.Sum, hvd.Average))
    for optimizer, factor in ((total, hvd.size()), (mean, 1), (total, hvd.size())):
        optimizer.zero_grad()
        twin = copy.deepcopy(model)
        inputs, targets = batches(1)[0]
        squares(model, share(inputs), share(targets)).backward()
        (squares(twin, inputs, targets) * factor).backward()
        optimizer.step()
        assert_same_gradients(model, twin)


test_on_ranks = session.on_ranks(globals(), 1, 2, 3, 4, session="torch")
