"""A step is a transaction, whenever a rank dies in it. 12 s of the push tier."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import tiers
from elastic_ranks import ElasticJob

from hororing._job.rendezvous.generations import Member
from hororing.elastic import steps as steps_module
from hororing.elastic.steps import Place, Steps
from hororing.errors import ShutDownError

# Each sample has a parameter, which decreases by 1 whenever the sample is in a step. A rank dies in
# steps 3, 6 and 9: before any rank has all gradients; when rank 1 has applied the step, but rank 0
# has not and holds garbage; and when all have applied it, but none has marked it. The rank that
# lacked step 6 remains, and a newcomer joins it.
DEATHS = """
import os, sys, time
from pathlib import Path

kind, applied = sys.argv[1], Path(sys.argv[2])
DEATHS = {3: ("nobody", 4), 6: ("some", 3), 9: ("all", 2)}  # and of how many ranks
COUNT, BATCH = 240, 2


def due(what):
    return DEATHS.get(state.steps + 1) == (what, hvd.size())


def die_once(there):
    while not there.exists():
        time.sleep(0.001)
    os.kill(os.getpid(), 9)


def before_step():
    if due("nobody") and hvd.rank() == 3:
        os.kill(os.getpid(), 9)


def after_step():
    if due("some") and hvd.rank() == 2:
        die_once(applied / "some")
    if due("some"):
        (applied / "some").touch()
    if due("all") and hvd.rank() == 1:
        (applied / "all").touch()
    if due("all") and hvd.rank() == 0:
        die_once(applied / "all")


def tell_of_syncs():
    sync = state.sync

    def told_sync():
        print("sent", hvd.elastic.history()[-1].generation, flush=True)
        sync()

    state.sync = told_sync


def end(times, *steps):
    print("steps", [(each.step, len(each.members)) for each in hvd.elastic.history()], flush=True)
    print("end", times == [state.epoch], state.steps, *steps, flush=True)


"""

TORCH = """
import torch
import hororing.torch as hvd
from hororing.elastic.steps import Steps

hvd.init()
model = torch.nn.Embedding(COUNT, 1)
torch.nn.init.zeros_(model.weight)
model.register_buffer("steps", torch.zeros(1))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
sampler = hvd.elastic.ElasticSampler(range(COUNT))
state = hvd.elastic.TorchState(
    model, optimizer, sampler=sampler, scheduler=scheduler, epoch=0, began=0, steps=0
)
tell_of_syncs()
taken = Steps.take


def take(steps, apply):
    if due("some") and hvd.rank() == 0:
        model.weight.grad.fill_(99)
        hvd.allreduce(torch.zeros(1), name="never")
    taken(steps, apply)


Steps.take = take


@hvd.elastic.run
def train(state):
    print("world", hvd.elastic.history()[-1].generation, hvd.rank(), hvd.size(), flush=True)
    while True:
        began = len(hvd.elastic.history()[-1].members) if sampler.processed_num == 0 else 0
        state.began = state.began or began
        for batch in torch.utils.data.DataLoader(sampler.dataset, BATCH, sampler=sampler):
            before_step()
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step()
            hvd.allreduce(torch.zeros(1), name="loss")
            scheduler.step()
            model.steps += 1
            state.steps += 1
            sampler.record_batch(0, BATCH)
            state.check_host_updates()
            time.sleep(0.002)
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        if state.began == 2:
            return
        state.began = 0


train(state)
times = sorted(set((-model.weight).long().flatten().tolist()))
end(times, scheduler.last_epoch, int(model.steps))
"""

# State other than weights counts, too: a layer counts its calls, and the optimizer its steps.
KERAS = """
os.environ["KERAS_BACKEND"] = "torch" if kind == "Keras on torch" else "tensorflow"
import keras
import numpy as np
import hororing.numpy

if kind == "tape":
    import hororing.tensorflow as hvd
else:
    import hororing.keras as hvd
if kind != "Keras on torch":
    import tensorflow as tf
    import hororing.tensorflow as of_tensorflow
    from hororing.tensorflow.steps import CountedSteps as Stepper
else:
    from hororing.keras.backends.torch import Stepper
from hororing.elastic.partition import share_of

taken = Stepper.take
stuck = False if kind == "Keras on torch" else tf.Variable(False)


def take(self, apply, gradients):
    if kind != "Keras on torch":
        wait = tf.cond(stuck, lambda: of_tensorflow.allreduce(0.0, name="never"), lambda: 0.0)
        gradients = [*gradients, wait]
    elif due("some") and hvd.rank() == 0:
        hororing.numpy.allreduce(np.zeros(1), name="never")
    taken(self, apply, gradients)


Stepper.take = take


class Counting(keras.layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.calls.assign_add(1.0)
        return inputs


class Total(keras.losses.Loss):
    def call(self, labels, outputs):
        return outputs


hvd.init()
model = keras.Sequential([keras.layers.Embedding(COUNT, 1, "zeros"), Counting()])
model.build((None, 1))
optimizer = keras.optimizers.SGD(1.0)
if kind == "Keras on TensorFlow":
    from hororing.toolkit.keras.optim import HierarchicalSGD

    try:
        HierarchicalSGD(keras.optimizers.SGD(1.0), period_group_size_dict={2: "world"})
    except ValueError as error:
        assert "not in an elastic job" in str(error), error
    else:
        raise AssertionError
if kind == "tape":
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0, done=0, began=0, steps=0)
else:
    optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Sum)
    model.compile(optimizer, Total(reduction="sum"))
    state = hvd.elastic.KerasState(model, epoch=0, done=0, began=0, steps=0)
tell_of_syncs()


class Account(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        before_step()
        if kind != "Keras on torch":
            stuck.assign(due("some") and hvd.rank() == 0)

    def on_train_batch_end(self, batch, logs=None):
        after_step()
        hororing.numpy.allreduce(np.zeros(1), name="loss")
        state.steps += 1
        state.done = min(state.done + BATCH * state.ranks_in_step, COUNT)


if kind == "tape":

    @tf.function
    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(batch, training=True))
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))


def steps_with(mine):
    if kind != "tape":
        commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=10**6)
        model.fit(
            mine[:, None], np.zeros((len(mine), 1)), batch_size=BATCH, epochs=1, shuffle=False,
            verbose=0, callbacks=[Account(), commit],
        )
        return
    account = Account()
    for at in range(0, len(mine), BATCH):
        account.on_train_batch_begin(at)
        step(tf.constant(mine[at : at + BATCH, None]))
        account.on_train_batch_end(at)
        state.check_host_updates()


@hvd.elastic.run
def train(state):
    print("world", hvd.elastic.history()[-1].generation, hvd.rank(), hvd.size(), flush=True)
    assert state.keeps_steps
    while True:
        if state.done == 0:
            state.began = len(hvd.elastic.history()[-1].members)
        if state.done < COUNT:
            steps_with(np.array(share_of(range(state.done, COUNT), hvd.rank(), hvd.size())))
        state.epoch += 1
        state.done = 0
        if state.began == 2:
            return


train(state)
times = sorted(set(np.rint(-model.get_weights()[0]).astype(int).ravel().tolist()))
end(times, int(model.layers[1].calls), int(optimizer.iterations))
"""


KINDS = ["torch", "Keras on torch", "Keras on TensorFlow", "tape"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", tiers.choose(KINDS, push=["torch"]))
def test_no_step_is_lost_or_taken_twice_whenever_a_rank_dies(kind: str, tmp_path: Path):
    pytest.importorskip("torch" if kind.endswith("torch") else "tensorflow")
    script = DEATHS + (TORCH if kind == "torch" else KERAS)
    if kind != "torch":
        pytest.importorskip("keras")
    with ElasticJob(np=4, min_np=1, max_np=4) as job:
        for _ in range(4):
            job.start(kind, str(tmp_path), script=script)
        job.wait(lambda: len(job.worlds()) == 4)
        last = job.process_of(0)
        new = job.start(kind, str(tmp_path), script=script)
        ends = job.ends(last, new)
        assert ends[0] == ends[1], job.lines
        _, once, *steps = ends[0].split()
        assert once == "True", job.lines
        assert len(set(steps)) == 1, steps
        told = [(each.step, len(each.members)) for each in job.worlds()]
        # Only the step that no rank has applied is repeated.
        assert told[:4] == [(0, 4), (2, 3), (6, 2), (9, 1)]
        assert str(told) in job.lines[last][-2]
        # The model was sent only to a rank that lacked a step, and to the newcomer.
        sent = {int(line.split()[1]) for line in job.lines[last] if line.startswith("sent")}
        assert sent == {1, 3, len(told)}, job.lines


OTHERS = """
import os, sys, time

import torch
import hororing.torch as hvd

hvd.init()
torch.manual_seed(os.getpid())
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
if sys.argv[1] == "adasum":
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Adasum)
else:
    from hororing.toolkit.torch.optim import HierarchicalSGD

    optimizer = HierarchicalSGD(
        optimizer, model.named_parameters(), period_group_size_dict={4: "world"},
        gradient_groups=None,
    )
state = hvd.elastic.TorchState(model, optimizer, left=20)


@hvd.elastic.run
def train(state):
    generation = hvd.elastic.history()[-1].generation
    print("world", generation, hvd.rank(), hvd.size(), flush=True)
    while state.left:
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        state.left -= generation == 3  # when one has gone and another one has come
        state.commit()
        time.sleep(0.002)


train(state)
if sys.argv[1] == "hierarchical":
    done = optimizer.steps_done
    assert optimizer.last_average == (done - done % 4, 4), (done, optimizer.last_average)
    optimizer.final_average()
print("end", [each.double().sum().item() for each in model.parameters()], flush=True)
"""


@tiers.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["adasum", "hierarchical"])
def test_other_optimizers_go_on_with_other_ranks(kind: str):  # full tier, 10 s each
    pytest.importorskip("torch")
    with ElasticJob(np=2, min_np=1, max_np=2) as job:
        job.begin(2, kind, script=OTHERS)
        ends = job.ends(*job.kill(1), job.start(kind, script=OTHERS))
        assert ends[0] == ends[1]
        assert "nan" not in ends[0]


def test_who_lacks_the_state_asks_its_own_host():
    pytest.importorskip("torch")
    from hororing.torch.elastic.sending import sources

    members = [Member(str(n), host, n, 0, 0) for n, host in enumerate("aabbccc")]
    lacks = [False, False, False, True, True, True, True]
    assert sources(members, lacks) == [0, 1, 2, 2, 0, 1, 0]
    assert sources(members[:2], [False, True]) is None


def test_only_steps_that_all_ranks_take_alike_are_agreed_on():
    torch = pytest.importorskip("torch")
    from hororing._requests.process_sets import ProcessSet, global_process_set
    from hororing.toolkit.torch.optim.averaging import Averaging
    from hororing.torch._optimizer.adasum import DeltaDistributed
    from hororing.torch._optimizer.distributed import Distributed
    from hororing.torch._optimizer.grouping import Grouping

    def agrees(mixin: type, ranks: ProcessSet) -> bool:
        settings = SimpleNamespace(options=SimpleNamespace(process_set=ranks), grouping=Grouping)
        kind = type("SGD", (mixin, torch.optim.SGD), {"_settings": settings})
        return kind.__new__(kind).agrees_on_steps

    assert agrees(Distributed, global_process_set)
    assert not agrees(Distributed, ProcessSet([0, 1]))
    assert not agrees(Averaging, global_process_set)
    assert not agrees(DeltaDistributed, global_process_set)


def test_steps_since_the_mark_are_replayed_and_no_others():
    """Without ranks: an interrupted script is called again, and repeats its steps."""
    steps, taken = Steps(lambda: (0, 0)), []
    place = Place(7, 1, (4, 3))
    steps.begin(place, keeps_parameters=True)
    assert [steps.recorded_ranks, steps.take(lambda: taken.append(1))] == [4, None]
    assert [steps.recorded_ranks, steps.take(lambda: taken.append(2))] == [4, None]
    assert steps.recorded_ranks == 3
    assert taken == []
    assert steps.mark(keeps_parameters=True)
    assert steps.place == Place(7, 2)
    assert steps.recorded_ranks == 0
    assert not steps.mark(keeps_parameters=True)


def test_news_are_heard_by_all_ranks_with_the_next_step(monkeypatch: pytest.MonkeyPatch):
    hvd = pytest.importorskip("hororing.numpy")
    hvd.init()
    monkeypatch.setattr(steps_module, "_SHARE_S", 0.0)  # share in every step
    updates = [(3, 1)]
    steps = Steps(lambda: updates[-1])
    steps.mark(keeps_parameters=True)
    shared = []
    for _ in range(3):
        steps.take(lambda: None)
        shared.append((steps.updates_shared, *steps.agreed()))
        updates.append((9, 2))
    assert shared == [(0, 0, 0), (1, 3, 1), (1, 9, 2)]
    steps.mark(keeps_parameters=False)  # like `commit`
    steps.take(lambda: None)
    assert steps.updates_shared == 1
    steps.take(lambda: None)
    assert steps.updates_shared == 1
    # The step is taken even if the others have ended with it.
    steps.mark(keeps_parameters=True)
    monkeypatch.setattr(hvd, "allreduce_async", lambda *_, **__: fail(ShutDownError()))
    assert steps.take(lambda: "taken") == "taken"


@pytest.mark.parametrize(("step_s", "requests"), [(0.0, 1), (0.01, 10), (0.2, 100)])
def test_news_are_shared_ten_times_a_second(
    step_s: float, requests: int, monkeypatch: pytest.MonkeyPatch
):
    hvd = pytest.importorskip("hororing.numpy")
    hvd.init()
    now = [0.0]
    monkeypatch.setattr(steps_module.time, "monotonic", lambda: now[0])
    steps, started = Steps(lambda: (int(now[0] * 1e6) + 1, 1)), []
    start = hvd.allreduce_async
    monkeypatch.setattr(hvd, "allreduce_async", lambda *a, **k: started.append(a) or start(*a, **k))
    steps.begin(Place(), keeps_parameters=True)
    for _ in range(100):
        now[0] += step_s
        steps.take(lambda: None)
        steps.mark(keeps_parameters=True)
        assert steps.updates_shared == (steps.place.step > 1)  # a mark does not ask rank 0
        steps.agreed()
    assert abs(len(started) - requests) <= 1


def fail(error: Exception) -> None:
    raise error


def test_a_scaler_that_failed_in_a_step_can_take_it_again():
    torch = pytest.importorskip("torch")
    from hororing.torch.elastic.handlers import handler_for

    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    handler = handler_for(scaler)
    assert handler is not None
    handler.mark()
    for go_back in (handler.go_back, handler.restore, lambda: None):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        assert weight.grad.item() == 1.0
        go_back()


def test_a_replayed_step_that_a_scaler_skips_is_replayed_all_the_same():
    torch = pytest.importorskip("torch")
    hvd = pytest.importorskip("hororing.torch")

    hvd.init()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer._steps = steps = Steps(lambda: (0, 0))
    steps.begin(Place(7, 1, (4,)), keeps_parameters=True)

    def step(factor: float) -> None:
        optimizer.zero_grad()
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    step(torch.inf)
    assert (steps.steps_to_replay, steps.recorded_ranks) == (0, 4)
    step(1.0)
    assert (weight.item(), steps.place.step) == (0.0, 8)  # 7 with the replayed one


def test_a_model_without_buffers_can_be_marked_again():
    torch = pytest.importorskip("torch")
    from hororing.torch.elastic import ModelStateHandler

    handler = ModelStateHandler(torch.nn.Linear(1, 1))
    for _ in range(3):
        handler.mark()
        handler.go_back()
