"""Elastic training with torch: ranks die and join while it runs. 15 s of the push tier."""

from __future__ import annotations

import pytest
import tiers
from elastic_ranks import ElasticJob

pytest.importorskip("torch")

# Trains until the end of an epoch that began with the newcomer.
SCRIPT = """
import os, sys, time
from collections import Counter

import torch
import hororing.torch as hvd
from hororing.errors import MismatchError

COUNT, BATCH = 50, 2
pairs = hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])
hvd.init(process_sets=list(pairs))
assert "torch._dynamo" in sys.modules  # or the others would wait for it
torch.manual_seed(os.getpid())
model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.001 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), groups=2)
differ = []
guard = hvd.Guard(model, optimizer, 5, on_divergence=differ.append, on_nonfinite="error")
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.999)
data = torch.utils.data.TensorDataset(torch.arange(COUNT, dtype=torch.float32).reshape(COUNT, 1))
sampler = hvd.elastic.ElasticSampler(data)
state = hvd.elastic.TorchState(
    model, optimizer, sampler=sampler, scheduler=scheduler, epoch=0, began=0, steps=0,
    seen=Counter(), sizes=[],
)
state.register_reset_callbacks([lambda: state.sizes.append(hvd.size())])


def generation():
    return hvd.elastic.history()[-1].generation


@hvd.elastic.run
def train(state):
    print("world", generation(), hvd.rank(), hvd.size(), flush=True)
    assert pairs[0].process_set_id == hvd.size() - 2  # of two ranks it is the global one
    if hvd.size() == 2:
        try:
            hvd.allreduce(torch.ones(1), process_set=pairs[1])
        except TypeError as error:
            assert "this job has 2 now" in str(error), error
    while state.began < 3:
        if not state.seen:
            state.began = generation()
        for index, (batch,) in enumerate(torch.utils.data.DataLoader(data, BATCH, sampler=sampler)):
            optimizer.zero_grad()
            inputs = batch if len(batch) > 1 else batch.repeat(2, 1)
            (model(inputs / COUNT) - 1).square().mean().backward()
            everybody = hvd.allgather(batch).reshape(-1).int().tolist()
            optimizer.step()
            scheduler.step()
            state.seen.update(everybody)
            state.steps += 1
            sampler.record_batch(index, BATCH)
            if state.steps % 2:
                state.commit()
            else:
                state.check_host_updates()
            time.sleep(0.002)
        assert set(state.seen) == set(range(COUNT)), state.seen
        assert sum(state.seen.values()) - COUNT < 3, state.seen
        state.seen = Counter()
        state.epoch += 1
        sampler.set_epoch(state.epoch)
    return "done"


done = train(state)
moments = [each["exp_avg_sq"].double().sum().item() for each in optimizer.state.values()]
values = [each.double().sum().item() for each in model.parameters()]
# The guard has given no false alarm, and finds what is wrong now.
report, rank = guard.report(), hvd.rank()
assert report["comparisons"] and not report["findings"], report


def step(scale=1.0):
    optimizer.zero_grad()
    (model(torch.rand(4, 1)).square().mean() * scale).backward()
    optimizer.step()


if rank == 1:
    model[0].weight.data[3, 0] += 1
for _ in range(6):
    step()
assert (differ[0].tensor, differ[0].ranks) == ("0.weight", [1]), differ
assert differ[0].step - differ[0].last_equal <= 5
try:
    step(float("nan") if rank == 2 else 1.0)
except FloatingPointError as error:
    assert "is NaN on rank 2 (" in str(error), error
else:
    raise AssertionError("no NaN was found")
print("end", done, state.steps, optimizer.param_groups[0]["lr"], sum(values), sum(moments),
      flush=True)
"""


def compressed(script: str, method: str) -> str:
    """Train with layers that are large enough for compression."""
    script = script.replace("8, 1)", "1200, 1)").replace("1, 8)", "1, 1200)")
    script = script.replace("groups=2", f"compression=hvd.Compression.{method}")
    return script.replace("BatchNorm1d(8)", "BatchNorm1d(1200)")


SCRIPTS = {
    "plain": SCRIPT,
    "int8": compressed(SCRIPT, "int8"),
    "auto": compressed(SCRIPT, "auto"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("rank", "script"),
    tiers.choose([(0, "plain"), (2, "plain"), (0, "int8"), (2, "auto")], push=[(0, "plain")]),
)
def test_training_goes_on_without_a_rank_and_with_a_new_one(rank: int, script: str):
    script = SCRIPTS[script]
    with ElasticJob(np=3, min_np=2, max_np=3) as job:
        for host in ("one", "two", "two"):
            job.start(script=script, HORORING_HOSTNAME=host)
        job.wait(lambda: all(job.started(each, 1) for each in range(3)))
        rest = job.kill(rank)
        new = job.start(script=script, HORORING_HOSTNAME="two")  # a host that has the state
        ends = job.ends(*rest, new)
        assert ends[0].startswith("end done")
        assert len(set(ends)) == 1, ends
        assert [len(world.members) for world in job.worlds()] == [3, 2, 3]
        assert [each.rank for each in job.lost()] == [rank]
