"""DistributedOptimizer in process sets: members train like one process with the data of all
members, and the others as if they were alone.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence

import pytest
import session
import torch
from torch_training import (
    BATCH,
    Careless,
    Twins,
    Words,
    batches,
    distributed,
    network,
    outputs_squared,
    plain_sgd,
    sgd,
    squares,
    start,
    word_batches,
)

import hororing.torch as hvd
from hororing._engine.state import rank, size
from hororing._requests.process_sets import ProcessSet, global_process_set, register, unregister
from hororing.errors import MismatchError

_sets: dict[tuple[int, ...], ProcessSet] = {}


def set_of(ranks: Sequence[int]) -> ProcessSet:
    """Return the set of these ranks, registered once. Called by all ranks."""
    key = tuple(ranks)
    if key == tuple(range(size())):
        return global_process_set
    if key not in _sets:
        _sets[key] = register(ProcessSet(key))
    return _sets[key]


def some_sets() -> Iterator[ProcessSet]:
    """Yield sets of one rank, of every second one, of all but one, and of all."""
    choices = {(size() - 1,), tuple(range(0, size(), 2)), tuple(range(1, size())) or (0,)}
    for ranks in sorted(choices | {tuple(range(size()))}):
        yield set_of(ranks)


def assert_trains_as_one(process_set: ProcessSet, **options) -> None:
    twins = Twins(process_set=process_set, **options)
    twins.train(3, options.get("backward_passes_per_step", 1))
    twins.check()


class Same(hvd.Compression.none):
    """Sends gradients unchanged through the code for compression."""


def case_start():
    start()


def case_members_train_as_one_process_and_others_alone():
    for process_set in some_sets():
        for options in (
            {},
            {"named": False},
            {"groups": 2},
            {"gradient_predivide_factor": 3.0},
            {"gradient_predivide_factor": 3.0, "groups": 1},
            {"compression": Same},
            {"op": hvd.Sum},
            {"backward_passes_per_step": 2},
            {"make": functools.partial(torch.optim.Adam, lr=0.02), "groups": 1},
        ):
            assert_trains_as_one(process_set, **options)


def case_sparse_gradients_are_reduced_among_members():
    for process_set in some_sets():
        for options in ({}, {"sparse_as_dense": True}, {"sparse_as_dense": True, "groups": 2}):
            twins = Twins(
                plain_sgd, Words(), loss=outputs_squared, process_set=process_set, **options
            )
            for _ in range(3):
                twins.train(1, draw=word_batches)
                assert twins.model.table.weight.grad.is_sparse
            twins.check()


def case_a_member_may_have_no_gradient():
    for process_set in some_sets():
        twins = Twins(plain_sgd, process_set=process_set)
        ranks = twins.ranks
        inputs, targets = batches(1)[0]
        if len(ranks) == 1:
            continue
        if rank() != ranks[0]:
            squares(twins.model, twins.share(inputs), twins.share(targets)).backward()
        for other in ranks[1:]:
            parts = twins.share(inputs, other), twins.share(targets, other)
            (squares(twins.twin, *parts) / len(ranks)).backward()
        twins.step()
        twins.check()


def case_two_sets_may_use_the_same_names_at_once():
    """All ranks run backward in one order, and step in another."""
    if size() == 1:
        return
    wholes = [set_of(range(size())), set_of(range(1, size())), set_of(range(size() - 1))]
    for options in ({}, {"groups": 2}, {"compression": Same}):
        pairs = [Twins(process_set=whole, **options) for whole in wholes]
        for turn, batch in enumerate(batches(4)):
            order = [(index + turn) % 3 for index in range(3)]
            for index in order:
                pairs[index].zero_grad()
                pairs[index].backward(*batch)
            for index in reversed(order):
                pairs[index].step()
        for twins in pairs:
            twins.check()


def case_disjoint_sets_need_not_step_equally_often():
    if size() < 4:
        return
    halves = set_of([0, 1]), set_of([2, 3])
    twins = Twins(process_set=halves[rank() // 2])
    twins.train(2 + 3 * (rank() // 2))
    twins.check()
    start()  # ranks have used different numbers of random batches


def case_ranks_outside_communicate_never():
    """They step while members wait for another call."""
    if size() == 1:
        return
    inside = set_of([size() - 1])
    model = network()
    optimizer = distributed(model, process_set=inside)
    inputs, targets = batches(1)[0]
    if rank() == 0:
        for _ in range(2):
            optimizer.zero_grad()
            squares(model, inputs, targets).backward()
            assert optimizer._handles == {}
            assert optimizer._requires_update == set()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.step(lambda: squares(model, inputs, targets))
    hvd.barrier()


def case_second_passes_are_guarded_among_members_only():
    if size() == 1:
        return
    pair = set_of([0, 1])
    model = network()
    optimizer = distributed(model, process_set=pair, op=hvd.Sum)
    inputs, targets = batches(1)[0]
    squares(model, inputs, targets).backward()
    if pair.included():
        with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
            squares(model, inputs, targets).backward()
    optimizer.zero_grad()


def case_closures_agree_among_members():
    for process_set in some_sets():
        make = functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=4)
        twins = Twins(make, process_set=process_set)

        def closure(module, optimizer, inputs, targets):
            optimizer.zero_grad()
            loss = squares(module, inputs, targets)
            loss.backward()
            return loss

        for batch in batches(2):
            mine = map(twins.share, batch)
            twins.optimizer.step(functools.partial(closure, twins.model, twins.optimizer, *mine))
            twins.plain.step(functools.partial(closure, twins.twin, twins.plain, *batch))
        twins.check(1e-8)


def case_scalers_agree_among_members():
    if size() < 3:
        return
    pair = set_of([0, 1])
    model = network().float()
    optimizer = distributed(model, process_set=pair)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    inputs, targets = (each.float() for each in batches(1)[0])
    poison = float("inf") if rank() == 1 else 1.0
    scaler.scale(squares(model, inputs, targets) * poison).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (512.0 if rank() < 2 else 1024.0)
    optimizer.zero_grad()


def case_copies_and_new_parameters_stay_in_the_set():
    for process_set in some_sets():
        twins = Twins(lambda params: sgd([*params][:2]), process_set=process_set)
        for more in (False, True):
            if more:
                for model, each in ((twins.model, twins.optimizer), (twins.twin, twins.plain)):
                    each.add_param_group({"params": model[2:].parameters()})
            twins = copy.deepcopy(twins)
            twins.train(2)
        twins.check()


def case_a_mismatch_is_raised_on_members():
    if size() == 1:
        return
    process_set = set_of(range(size() - 2, size()))
    model = network()
    optimizer = distributed(model, compression=Careless, process_set=process_set)
    loss = squares(model, *batches(1)[0])
    if process_set.included():
        text = rf"(?s)'2\.weight'.*rank {size() - 1}"
        with Careless.on(size() - 1), pytest.raises(MismatchError, match=text):
            loss.backward()
    else:
        loss.backward()
        optimizer.step()
    hvd.barrier()


def case_sets_that_cannot_be_used_are_refused():
    model = network()
    optimizer = sgd(model.parameters())
    for wrong, text in (
        (ProcessSet([0]), "is not registered"),
        (ProcessSet(range(size(), size() + 1)), "is not registered"),
        ([0], "must be a ProcessSet, not list"),
        (None, "must be a ProcessSet"),
    ):
        with pytest.raises(TypeError, match=text):
            hvd.DistributedOptimizer(optimizer, process_set=wrong)
    assert type(optimizer) is torch.optim.SGD


def case_a_removed_set_is_noticed():
    if size() < 3:
        return
    inputs, targets = batches(1)[0]
    removed = set_of([0, 2])
    models = [network() for _ in range(2)]
    optimizers = [distributed(model, process_set=removed) for model in models]
    del _sets[0, 2]
    inside = removed.included()
    unregister(removed)
    if inside:
        with pytest.raises(TypeError, match="not registered"):
            squares(models[0], inputs, targets).backward()
        with pytest.raises(TypeError, match="not registered"):
            optimizers[1].step()
    # Its number may now belong to other ranks, and later to itself again.
    others = register(ProcessSet([0, 1])) if (0, 1) not in _sets else None
    register(removed)
    if inside and others is not None and others.process_set_id != removed.process_set_id:
        with pytest.raises(ValueError, match="registered again"):
            squares(models[0], inputs, targets).backward()
    unregister(removed)
    if others is not None:
        unregister(others)
    hvd.barrier()


def case_unnamed_optimizers_are_counted_in_their_set():
    if size() == 1:
        return
    pair = set_of([0, 1])
    model = network()
    if pair.included():  # only members create it
        extra = hvd.DistributedOptimizer(sgd(model.parameters()), process_set=pair)
    for process_set in (pair, global_process_set):
        assert_trains_as_one(process_set, named=False)
    if pair.included():
        del extra


assert BATCH % 12 == 0  # divisible for every set


test_on_ranks = session.on_ranks(globals(), 1, 2, 3, 4, session="torch")
