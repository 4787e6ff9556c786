"""Features that scripts for Horovod's DistributedOptimizer rely on: names, attributes, uneven data
with join, compiled models, fused optimizers with a scaler.

The oracles are those of torch_training.py: every rank computes the results of all ranks.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle

import pytest
import session
import torch
from torch import nn
from torch_training import (
    Twins,
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
    train,
)

import hororing.torch as hvd
from hororing._requests.arguments import Adasum
from hororing._requests.verbs import join


def case_start():
    start()


def case_the_first_unnamed_optimizer_has_the_names_of_horovod():
    model = network()
    params = list(model.parameters())
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1))
    assert [optimizer._parameter_names[param] for param in params] == [
        "allreduce.noname.0.0", "allreduce.noname.0.1",
        "allreduce.noname.1.0", "allreduce.noname.1.1",
        "allreduce.noname.1.2", "allreduce.noname.1.3",
    ]  # fmt: skip
    # They collide neither with unnamed calls in between nor with other optimizers.
    another = hvd.DistributedOptimizer(plain_sgd(network().parameters()))
    assert not {*optimizer._parameter_names.values()} & {*another._parameter_names.values()}
    squares(model, *batches(1)[0]).backward()
    handles = [hvd.allreduce_async(torch.ones(2)) for _ in range(3)]
    optimizer.step()
    for handle in handles:
        assert hvd.synchronize(handle).tolist() == [1, 1]


def case_attributes_mean_what_they_do_in_horovod():
    model = network()
    params = list(model.parameters())
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        sgd(params), model.named_parameters(), backward_passes_per_step=2
    )
    several = hvd.size() > 1
    assert optimizer.backward_passes_per_step == 2
    assert optimizer._parameter_names == {p: n for n, p in model.named_parameters()}
    assert optimizer._requires_update == (set(params[2:]) if several else set())
    assert optimizer._groups is None
    assert optimizer._handles == {}
    inputs, targets = batches(1)[0]
    squares(model, inputs, targets).backward()
    assert optimizer._handles == {}  # the first of two passes
    hidden = model[:2](inputs).requires_grad_() * 1.0
    seen = []
    hidden.register_hook(lambda _, each=optimizer: seen.append(each._handles))
    squares(model[2:], hidden, targets).backward()
    assert optimizer._handles == {}  # all gradients are reduced
    if several:  # some were in flight before
        assert set() < set(seen[0]) < optimizer._requires_update
        for handle, context in seen[0].values():
            assert handle > 0
            assert context is None
    optimizer.zero_grad()
    del optimizer, hidden  # otherwise the newer optimizer would reduce the shared parameters

    for groups in ([params[2:4], params[4:5]], 1):
        gc.collect()
        grouped = hvd.DistributedOptimizer(sgd(params), model.named_parameters(), groups=groups)
        expected = groups if isinstance(groups, list) else [params[2:]]
        assert [list(map(id, group)) for group in grouped._groups] == [
            list(map(id, group)) for group in expected
        ]
        squares(model[2:], torch.ones(4, 7), torch.ones(4, 3)).backward()
        grouped.step()
        grouped.zero_grad()
        del grouped


def case_parameters_that_are_added_have_names():
    for named in (True, False):
        model = network()
        optimizer = hvd.DistributedOptimizer(
            sgd(model[0].parameters()), model.named_parameters() if named else None
        )
        optimizer.add_param_group({"params": model[2].parameters()})
        if hvd.size() > 1:
            for each, module in ((optimizer, model), copy.deepcopy((optimizer, model))):
                names = [each._parameter_names[p] for p in module[:3].parameters()]
                assert len(set(names)) == 4
                if named and each is optimizer:
                    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]


def case_it_is_saved_as_the_optimizer_that_was_wrapped():
    model = network()
    optimizer = distributed(model)
    train(model, optimizer, batches(2))
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    loaded, plain = torch.load(file, weights_only=False)
    assert type(plain) is torch.optim.SGD
    assert plain.param_groups[0]["params"][0] is loaded[0].weight
    hvd.DistributedOptimizer(plain, [(f"loaded.{n}", p) for n, p in loaded.named_parameters()])
    data = batches(2)
    train(model, optimizer, data)
    train(loaded, plain, data)
    assert_same(model, loaded)
    assert type(copy.copy(optimizer)) is type(optimizer)
    assert pickle.loads(pickle.dumps(optimizer.state_dict()))["param_groups"]


def case_zero_gradients_are_there_after_the_state_was_broadcast():
    for make in (sgd, plain_sgd):
        model = nn.ModuleDict({"words": nn.Embedding(4, 3, sparse=True), "out": nn.Linear(3, 2)})
        model["out"].bias.requires_grad_(False)
        optimizer = distributed(model, make)
        hvd.broadcast_optimizer_state(optimizer, 0, model)
        assert not model["out"].weight.grad.any()
        assert model["out"].bias.grad is None
        assert model["words"].weight.grad is None
    optimizer = torch.optim.SparseAdam([model["words"].weight])
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert model["words"].weight.grad is None


def case_numbers_of_passes_must_be_whole():
    optimizer = sgd(network().parameters())
    for wrong in (2.5, "2", None):
        with pytest.raises(TypeError):
            hvd.DistributedOptimizer(optimizer, backward_passes_per_step=wrong)
    assert type(optimizer) is torch.optim.SGD
    hvd.DistributedOptimizer(optimizer)
    with pytest.raises(TypeError):
        optimizer.set_backward_passes_per_step(1.5)
    with pytest.raises(ValueError, match="at least 1"):
        optimizer.set_backward_passes_per_step(-1)
    assert optimizer.backward_passes_per_step == 1


def case_ranks_may_have_different_numbers_of_batches_and_join():
    """Rank r has r + 2 batches. Joined ranks contribute zeros, and averages are over all ranks."""
    for options in (
        {},
        {"named": False},
        {"groups": 2},
        {"op": hvd.Sum},
        {"compression": hvd.Compression.none, "gradient_predivide_factor": 2.0},
        {"backward_passes_per_step": 2},
    ):
        passes = options.get("backward_passes_per_step", 1)
        twins = Twins(**options)
        model, optimizer = twins.model, twins.optimizer
        divisor = 1 if options.get("op") == hvd.Sum else hvd.size()
        for step in range(hvd.size() + 1):
            now = batches(passes)
            if step < hvd.rank() + 2:
                optimizer.zero_grad()
                for inputs, targets in now:
                    squares(model, share(inputs), share(targets)).backward()
                optimizer.step()
            twins.plain.zero_grad()
            for inputs, targets in now:
                for rank in range(max(step - 1, 0), hvd.size()):
                    part = squares(twins.twin, share(inputs, rank), share(targets, rank))
                    (part / divisor).backward()
            twins.plain.step()
        last = join()
        assert last == hvd.size() - 1
        hvd.broadcast_parameters(model.state_dict(), last)
        hvd.broadcast_optimizer_state(optimizer, last)
        twins.check()
        # The next epoch.
        twins.train(1, passes)
        twins.check()


def case_an_optimizer_made_after_a_join_has_names_of_its_own():
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    optimizers = []
    for layer in layers:
        optimizers.append(hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1)))
        hvd.join()
    # Gradients of both are in flight.
    layers[1](layers[0](torch.ones(2, 3))).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def case_changes_of_parameters_join_as_well():
    if hvd.size() == 3:
        return
    model = network()
    optimizer = distributed(model, plain_sgd, op=Adasum)
    for step, (inputs, targets) in enumerate(batches(hvd.size() + 1)):
        if step < hvd.rank() + 2:
            twin = copy.deepcopy(model)
            train(model, optimizer, [(inputs, targets)])
            if step == hvd.size():  # all others have joined, so this rank's step is plain
                plain = plain_sgd(twin.parameters())
                squares(twin, share(inputs), share(targets)).backward()
                plain.step()
                for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    hvd.broadcast_parameters(model.state_dict(), join())
    assert_equal_on_all_ranks(*model.parameters())


def case_compiled_models_train_as_others():
    """Uses a backend without a compiler; only the production of gradients matters."""
    for options in ({}, {"groups": 2}, {"backward_passes_per_step": 2}):
        for compile_first in (True, False):
            model = network()
            compile_ = functools.partial(torch.compile, backend="aot_eager")
            compiled = compile_(model) if compile_first else model
            twins = Twins(model=model, named=compiled.named_parameters(), **options)
            compiled = compiled if compile_first else compile_(model)
            twins.loss = lambda module, *batch, m=model, c=compiled: squares(
                c if module is m else module, *batch
            )
            for _ in range(2):
                twins.train(1, options.get("backward_passes_per_step", 1))
                assert_equal_on_all_ranks(*(param.grad for param in model.parameters()))
            twins.check()


def case_compiled_steps_work():
    compile_ = functools.partial(torch.compile, backend="aot_eager")

    @compile_
    def forward_and_backward(module, optimizer, inputs, targets):
        loss = squares(module, inputs, targets)
        loss.backward()
        return loss.detach()

    @compile_
    def everything(module, optimizer, inputs, targets):
        optimizer.zero_grad()
        loss = squares(module, inputs, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    @compile_
    def clipped(module, optimizer, inputs, targets):
        optimizer.zero_grad()
        loss = squares(module, inputs, targets)
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(module.parameters(), 100.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        return loss.detach()

    for step in (forward_and_backward, everything, clipped):
        twins = Twins()
        for inputs, targets in batches(3):
            twins.zero_grad()
            step(twins.model, twins.optimizer, share(inputs), share(targets))
            if step is forward_and_backward:
                twins.optimizer.step()
            squares(twins.twin, inputs, targets).backward()
            twins.plain.step()
        twins.check()


def case_fused_optimizers_and_scalers_skip_the_same_steps():
    for op in (hvd.Average, Adasum):
        if op == Adasum and hvd.size() == 3:
            continue
        model = network().float()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
            model.named_parameters(),
            op=op,
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        for step, (inputs, targets) in enumerate(batches(4)):
            before = copy.deepcopy(model)
            poison = float("inf") if step == 2 and hvd.rank() == 0 else 1.0
            optimizer.zero_grad()
            loss = squares(model, share(inputs.float()), share(targets.float()))
            scaler.scale(loss * poison).backward()
            scaler.step(optimizer)
            scaler.update()
            assert_equal_on_all_ranks(*model.parameters())
            skipped = torch.equal(before[0].weight, model[0].weight)
            assert skipped == (step == 2)


def case_operations_other_than_sums_see_zeros_of_ranks_without_a_gradient():
    for op, expected in ((hvd.Min, -2.0), (hvd.Max, 0.0), (hvd.Product, 0.0)):
        param = nn.Parameter(torch.ones(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), op=op)
        if hvd.rank() == 0:
            (param * -2.0).sum().backward()
        optimizer.step()
        assert param.grad.tolist() == [expected if hvd.size() > 1 else -2.0] * 3


test_on_ranks = session.on_ranks(globals(), 1, 2, 3, 4, session="torch")
