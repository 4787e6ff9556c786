"""Elastic training without ranks: the loop, states, and samples. Push tier, 3 s."""

from __future__ import annotations

import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hororing import elastic
from hororing._adapters import elastic_callbacks
from hororing._engine import membership
from hororing._engine import state as engine_state
from hororing._requests import names
from hororing.elastic import state as state_module
from hororing.elastic.partition import samples_left, share_of
from hororing.errors import (
    HostsUpdatedInterrupt,
    MismatchError,
    ShutDownError,
)

# ---------------------------------------------------------------------------------------------
# Samples


EVENTS = st.tuples(st.sampled_from(["batch", "commit", "lost", "leave"]), st.integers(1, 4))


@settings(max_examples=150)
@given(st.integers(1, 40), st.integers(1, 5), st.booleans(), st.lists(EVENTS, max_size=30))
def test_every_sample_comes_once_whatever_happens(
    count: int, batch: int, shuffle: bool, events: list[tuple[str, int]]
):
    """Commits, losses and joins happen at any time between batches; a loss restores a commit."""
    module = pytest.importorskip("hororing.torch.elastic.sampler")
    place = SimpleNamespace(rank=lambda: place.now, size=lambda: place.ranks, now=0, ranks=3)

    def dealt(state: dict[str, int]) -> tuple[list[Any], list[list[int]]]:
        samplers = []
        for rank in range(place.ranks):
            place.now = rank
            sampler = module.ElasticSampler(range(count), shuffle, seed=2)
            sampler.load_state_dict(state)
            samplers.append(sampler)
        shares = [list(each) for each in samplers]
        assert {len(share) for share in shares} == {len(each) for each in samplers}
        return samplers, shares

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "state", place)
        committed = {"epoch": 1, "processed_num": 0}
        seen: list[int] = []  # by the model, as it is
        saved: list[int] = []  # by the model, as it was committed
        samplers, shares = dealt(committed)
        at = 0
        while committed["processed_num"] < count:
            event, ranks = events.pop() if events else ("commit" if at else "batch", 0)
            if event == "batch" and at < len(shares[0]):
                for sampler, share in zip(samplers, shares, strict=True):
                    seen += share[at : at + batch]
                    sampler.record_batch(0, batch)
                at += batch
            if event in ("commit", "leave"):
                saved, committed = list(seen), samplers[-1].state_dict()
            if ranks and event in ("lost", "leave"):
                seen, place.ranks = list(saved), ranks
                samplers, shares = dealt(committed)
                at = 0
            elif event == "commit" and not events:
                samplers, shares = dealt(committed)
                at = 0
    times = Counter(saved)
    assert set(times) == set(range(count))
    assert sum(times.values()) - count < 4  # ranks: the last samples are dealt evenly


def test_samples_are_dealt_in_turn_and_the_first_again():
    assert [share_of([5, 6, 7, 8, 9], rank, 2) for rank in (0, 1)] == [[5, 7, 9], [6, 8, 5]]
    assert [share_of([3], rank, 4) for rank in range(4)] == [[3]] * 4
    assert share_of([], 0, 3) == []
    order = samples_left(10, 0, 3)
    assert sorted(order) == list(range(10))
    assert order != sorted(order)
    assert samples_left(10, 4, 3) == order[4:]
    assert samples_left(4, 1, None) == [1, 2, 3]


# ---------------------------------------------------------------------------------------------
# States


def state(**objects: Any) -> elastic.ObjectState:
    return elastic.ObjectState(lambda each: each, lambda: 0, **objects)


def test_an_object_state_saves_copies():
    mine = state(epoch=1, log=[1])
    mine.log.append(0)
    mine.restore()
    assert mine.log == [1]  # as it was made
    mine.epoch = 2
    mine.log.append(2)
    mine.save()
    mine.epoch = 3
    mine.log.append(3)
    mine.restore()
    assert (mine.epoch, mine.log) == (2, [1, 2])
    mine.log.append(4)
    mine.restore()
    assert mine.log == [1, 2]
    with pytest.raises(AttributeError, match="nothing"):
        _ = mine.nothing


def test_another_rank_gets_what_rank_0_has_saved():
    other = elastic.ObjectState(lambda each: {"epoch": 7}, lambda: 1, epoch=0)
    other.sync()
    assert other.epoch == 7
    other.epoch = 8
    other.restore()
    assert other.epoch == 7


@pytest.mark.parametrize(("what", "skip_sync"), [(1, True), (2, False), (3, False)])
def test_announced_changes_interrupt_once(what: int, skip_sync: bool):
    mine = state(epoch=0)
    mine.commit()
    mine.on_hosts_updated(5, what)
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        mine.commit()
    assert interrupt.value.skip_sync is skip_sync
    mine.commit()
    mine.on_hosts_updated(4, 2)  # an old update
    mine.commit()
    mine.on_hosts_updated(6, 1)
    mine.on_hosts_updated(7, 2)
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        mine.check_host_updates()
    assert interrupt.value.skip_sync is False


# ---------------------------------------------------------------------------------------------
# The loop


class Traced(elastic.State):
    """Records its calls."""

    def __init__(self, trace: list[str]) -> None:
        super().__init__(lambda each: each, lambda: 0)
        self.trace = trace

    def save(self) -> None:
        self.trace.append("save")

    def restore(self) -> None:
        self.trace.append("restore")

    def sync(self) -> None:
        self.trace.append("sync")

    def reset(self) -> None:
        self.trace.append("adapt")


def traced(outcomes: list[Any], elastic_job: bool = True) -> tuple[list[str], Any]:
    """Run the loop with a function that has these outcomes; return the trace and the result."""
    trace: list[str] = []

    def func(given: Any, *args: Any, **kwargs: Any) -> Any:
        assert args == (1,)
        assert kwargs == {"two": 2}
        trace.append("func")
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    own = Traced(trace)
    own.register_reset_callbacks([lambda: trace.append("callback")])
    result: Any
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "is_elastic", lambda: elastic_job)
        try:
            result = elastic.run_fn(func, lambda: trace.append("reset"))(own, 1, two=2)
        except Exception as error:
            result = error
    return trace, result


BEGIN = ["save", "sync", "func"]


def test_the_loop_goes_back_and_on():
    assert traced(["done"]) == (BEGIN, "done")
    again = ["reset", "adapt", "callback", "save", "sync", "func"]
    assert traced([ShutDownError("x"), 3]) == ([*BEGIN, "restore", *again], 3)
    assert traced([HostsUpdatedInterrupt(False), 3]) == ([*BEGIN, *again], 3)
    skipped = [each for each in again if each != "sync"]
    assert traced([HostsUpdatedInterrupt(True), 3]) == ([*BEGIN, *skipped], 3)
    both = [HostsUpdatedInterrupt(True), ShutDownError("x"), 3]
    assert traced(both) == ([*BEGIN, *skipped, "restore", *again], 3)


@pytest.mark.parametrize("error", [ShutDownError, HostsUpdatedInterrupt])
def test_what_the_function_has_made_goes_before_it_is_called_again(error: type[Exception]):
    """The hooks of an optimizer, too, which would reduce the gradients of the model again."""
    made: list[Any] = []

    def func(_: Any) -> bool:
        if made:
            return made[0]() is None
        optimizer = np.zeros(1)
        made.append(weakref.ref(optimizer))
        raise error("")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "is_elastic", lambda: True)
        assert elastic.run_fn(func, lambda: None)(Traced([]))


def test_a_failure_while_the_state_is_sent_is_one_like_others():
    calls = []

    class Failing(Traced):
        def sync(self) -> None:
            super().sync()
            calls.append(1)
            if len(calls) == 2:
                raise ShutDownError("in the middle")

    trace: list[str] = []
    outcomes = [HostsUpdatedInterrupt(False), "done"]

    def func(_: Any) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "is_elastic", lambda: True)
        assert elastic.run_fn(func, lambda: trace.append("reset"))(Failing(trace)) == "done"
    again = ["reset", "adapt", "save", "sync"]
    assert trace == ["save", "sync", *again, "restore", *again]


def test_what_the_script_has_done_wrong_is_raised():
    for error in (ValueError("x"), KeyError("x"), MismatchError("shapes differ")):
        assert traced([error]) == (BEGIN, error)


def test_a_job_that_is_not_elastic_raises_with_the_way_out():
    trace, error = traced([ShutDownError("rank 1 has ended")], elastic_job=False)
    assert trace == BEGIN
    assert type(error) is ShutDownError
    assert str(error).startswith("rank 1 has ended; ")
    assert "hororun --min-np" in str(error)


# ---------------------------------------------------------------------------------------------
# model.fit


def batches_of_epochs(callbacks: list[Any], model: Any, steps: int, first: int, epochs: int):
    """Call the callbacks like `fit`; return the numbers of batches of the epochs."""
    done = []

    def call(name: str, *arguments: Any) -> None:
        for each in callbacks:
            method = getattr(each, name, None)
            if method is not None:
                method(*arguments)

    for each in callbacks:
        each.model, each.params = model, {"steps": steps}
    call("on_train_begin")
    for epoch in range(first, epochs):
        call("on_epoch_begin", epoch)
        count = 0
        for batch in range(steps):
            call("on_train_batch_begin", batch)
            count += 1
            call("on_train_batch_end", batch)
            if model.stop_training:
                break
        done.append(count)
        call("on_epoch_end", epoch)
        if model.stop_training:
            break
    call("on_train_end")
    return done


@pytest.mark.parametrize("commit_first", [True, False])
def test_callbacks_resume_where_the_state_is(commit_first: bool):
    mine = state(epoch=0, batch=0)
    saved: list[tuple[int, int]] = []
    stop_at = 6

    def commit() -> None:
        saved.append((mine.epoch, mine.batch))
        if len(saved) == stop_at:
            raise HostsUpdatedInterrupt

    mine.commit = commit
    notes = [elastic_callbacks.UpdateEpochState(mine), elastic_callbacks.UpdateBatchState(mine)]
    commits = [elastic_callbacks.CommitState(mine)]
    model = SimpleNamespace(stop_training=False)
    callbacks = commits + notes if commit_first else notes + commits
    with pytest.raises(HostsUpdatedInterrupt):
        batches_of_epochs(callbacks, model, 4, 0, 3)
    assert saved == [(0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]
    stop_at = 0
    # As in `run`, the callbacks are new or the old ones.
    assert batches_of_epochs(callbacks, model, 4, mine.epoch, 3) == [2, 4]
    assert saved[6:] == [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (3, 0)]


@pytest.mark.parametrize("first", [0, 2])
def test_epochs_are_counted_however_fit_is_called(first: int):
    """Horovod's scripts train `epochs - state.epoch` more epochs, which Keras counts from 0."""
    mine = state(epoch=0, batch=0)
    callbacks = [elastic_callbacks.UpdateEpochState(mine), elastic_callbacks.UpdateBatchState(mine)]
    model = SimpleNamespace(stop_training=False)
    for epochs in (3, 2, 4):
        before = mine.epoch
        batches_of_epochs(callbacks, model, 1, 0, epochs)
        assert mine.epoch == before + epochs
    mine.epoch = first  # as after a failure
    batches_of_epochs(callbacks, model, 1, 2, 5)
    assert mine.epoch == 5


def test_commits_are_as_far_apart_as_asked():
    mine = state(epoch=0, batch=0)
    saved: list[int] = []
    mine.commit = lambda: saved.append(mine.batch)
    model = SimpleNamespace(stop_training=False)
    callbacks = [
        elastic_callbacks.CommitState(mine, batches_per_commit=3),
        elastic_callbacks.UpdateBatchState(mine),
    ]
    batches_of_epochs(callbacks, model, 7, 0, 1)
    assert saved == [3, 6, 0]


# ---------------------------------------------------------------------------------------------
# The state of a newcomer


def test_an_optimizer_gets_its_state_where_its_parameters_are():
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("hororing.torch.state")

    def made() -> Any:
        weight = torch.nn.Parameter(torch.zeros(3, device="meta"))  # stands for a GPU
        return torch.optim.Adam([weight]), [weight]

    root, params = made()
    moment = torch.zeros_like(params[0])
    root.state[params[0]] = {"step": torch.tensor(1.0), "exp_avg": moment}
    description = module._describe(root, params, [])
    new, params = made()
    module._adopt(new, params, description)
    devices = {name: each.device.type for name, each in new.state[params[0]].items()}
    assert devices == {"step": "cpu", "exp_avg": "meta"}


def test_a_sampler_of_one_rank_is_refused():
    data = pytest.importorskip("torch.utils.data")
    module = pytest.importorskip("hororing.torch")
    sampler = data.DistributedSampler(range(8), 2, 0)
    with pytest.raises(TypeError, match="sampler has the samples of one rank"):
        module.elastic.TorchState(sampler=sampler)


def test_a_copy_of_a_model_takes_the_memory_of_the_one_before():
    torch = pytest.importorskip("torch")
    handlers = pytest.importorskip("hororing.torch.elastic.handlers")
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    model.register_buffer("same", torch.ones(1).expand(3))  # cannot be overwritten in place
    plain = handlers.ModelStateHandler(torch.nn.Sequential(model[0], model[1]))
    for handler, kept in ((plain, True), (handlers.ModelStateHandler(model), False)):
        before = {name: each.data_ptr() for name, each in handler.kept().items()}
        with torch.no_grad():
            model[0].weight += 1
            model[1].running_mean += 2
        handler.save()
        wanted = {name: each.clone() for name, each in handler.value.state_dict().items()}
        assert (before == {name: each.data_ptr() for name, each in handler.kept().items()}) == kept
        assert handler.kept()._metadata == handler.value.state_dict()._metadata
        with torch.no_grad():
            model[0].weight.zero_()
        if kept:  # otherwise torch cannot load it
            handler.restore()
            assert all(
                torch.equal(handler.value.state_dict()[name], wanted[name]) for name in wanted
            )
    optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.5)
    handler = handlers.OptimizerStateHandler(optimizer)
    for lr in (1.0, 2.0):
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = lr
        handler.save()
        held = handler.kept()["state"][0]["momentum_buffer"]
        assert torch.equal(held, optimizer.state[model[0].weight]["momentum_buffer"])
        assert held.data_ptr() != optimizer.state[model[0].weight]["momentum_buffer"].data_ptr()
        assert handler.kept()["param_groups"][0]["lr"] == lr


def test_the_digest_of_a_state_is_that_of_its_bits():
    torch = pytest.importorskip("torch")
    digest_of = pytest.importorskip("hororing.torch.elastic.state").digest_of
    whole = torch.arange(23, dtype=torch.float32)
    mixed = [torch.ones(3, dtype=torch.bool), torch.tensor(2.0), torch.zeros(0), whole.half()]
    mixed += [torch.eye(3).to_sparse(), torch.ones(()).expand(3), torch.tensor([1j]).conj()]
    digest = digest_of([whole[1:], *mixed])
    assert digest == digest_of([whole[1:].clone(), *mixed])  # independent of the place in memory
    assert 0 <= digest < 2**62
    for number in (0, 5, 21):
        other = whole[1:].clone()
        other[number] += 1
        assert digest != digest_of([other, *mixed])


def test_all_ranks_send_if_one_needs_it(monkeypatch: pytest.MonkeyPatch):
    """The remaining ranks have stopped for a removal, and meanwhile a new rank has come."""
    new_needs = [0]

    def allgather(mine: Any, **_: Any) -> Any:
        other = mine.copy()
        other[0, :2] = new_needs[0], 7
        return np.concatenate([mine, other])

    monkeypatch.setattr(engine_state, "is_initialized", lambda: True)
    monkeypatch.setattr(engine_state, "size", lambda: 2)
    monkeypatch.setattr(state_module.hvd, "allgather", allgather)
    skipped = [*BEGIN, "reset", "adapt", "callback", "save"]
    assert traced([HostsUpdatedInterrupt(True), 1]) == ([*skipped, "func"], 1)
    new_needs[0] = 1
    assert traced([HostsUpdatedInterrupt(True), 1]) == ([*skipped, "sync", "func"], 1)


def test_optimizers_are_counted_from_where_the_function_begins():
    names.default_name(names.OPTIMIZER)
    first = names.optimizers()
    made = []

    def func(_: Any) -> str:
        made.append(str(names.default_name(names.OPTIMIZER)))
        if len(made) < 3:
            raise ShutDownError("again")
        return "done"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "is_elastic", lambda: True)
        assert elastic.run_fn(func, names.restart_default_names)(Traced([])) == "done"
    names.restart_optimizers({})
    assert first
    assert len(set(made)) == 1, made


def test_what_reset_callbacks_change_is_sent():
    sent = []

    def broadcast(each: Any) -> Any:
        sent.append(each)
        return each

    mine = elastic.ObjectState(broadcast, lambda: 0, rate=1)
    mine.rate = 2  # since the constructor
    mine.register_reset_callbacks([lambda: setattr(mine, "rate", 3)])
    outcomes: list[Any] = [HostsUpdatedInterrupt(), "done"]

    def func(_: Any) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert elastic.run_fn(func, lambda: None)(mine) == "done"
    assert sent == [{"rate": 2}, {"rate": 3}]


def test_a_state_tells_the_forms_of_its_parts():
    torch = pytest.importorskip("torch")
    made = pytest.importorskip("hororing.torch.elastic.state").TorchState
    model = torch.nn.Linear(2, 3)
    state = made(model, torch.optim.SGD(model.parameters(), lr=0.1), epoch=0)
    assert state._parts() == {
        "state": "TorchState, steps kept: False",
        "model": "ModelStateHandler",
        "model.weight": "float32 [3, 2]",
        "model.bias": "float32 [3]",
        "optimizer": "OptimizerStateHandler",
        "optimizer.groups": "SGD of [2] parameters",
    }
