"""A rank of an elastic job that trains with PyTorch; a step is a transaction. For nemesis.py.

    nemesis_torch_ranks.py STOP FLOATS

Each sample has a parameter, which decreases by 1 whenever the sample is in a step; momentum makes
the bits depend on the order of all steps. It prints the same lines as nemesis_ranks.py. If a sample
was not used once in an epoch, except those dealt twice for equal shares, it prints WRONG and exits
with code 9. FLOATS is not used.
"""

from __future__ import annotations

import os
import sys
import time
import zlib

import torch

import hororing.torch as hvd

COUNT, BATCH, SHOWN_EVERY = 101, 2, 5

torch.set_num_threads(1)
hvd.init()
counted = torch.nn.Embedding(COUNT, 1)
moved = torch.nn.Embedding(COUNT, 1, dtype=torch.float64)
for each in (counted, moved):
    torch.nn.init.zeros_(each.weight)
model = torch.nn.ModuleList([counted, moved])
groups = [{"params": counted.parameters()}, {"params": moved.parameters(), "momentum": 1.0}]
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(groups, lr=1.0), model.named_parameters(), op=hvd.Sum
)
sampler = hvd.elastic.ElasticSampler(range(COUNT))
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, steps=0)


def say(*words: object) -> None:
    print(*words, flush=True)


def crc() -> int:
    told = counted.weight.detach().numpy().tobytes() + moved.weight.detach().numpy().tobytes()
    return zlib.crc32(told)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    say("world", hvd.elastic.history()[-1].generation, hvd.rank(), hvd.size())
    while True:
        for batch in torch.utils.data.DataLoader(sampler.dataset, BATCH, sampler=sampler):
            optimizer.zero_grad()
            (counted(batch).sum() + moved(batch).sum()).backward()
            optimizer.step()
            sampler.record_batch(0, BATCH)
            state.steps += 1
            state.check_host_updates()
            if state.steps % SHOWN_EVERY == 0:
                say("step", hvd.elastic.history()[-1].generation, state.steps, crc())
            stop = torch.tensor([os.path.exists(sys.argv[1])], dtype=torch.int64)
            if hvd.allreduce(stop, op=hvd.Max, name="stop").item():
                return
            time.sleep(0.001)
        state.epoch += 1
        used = -counted.weight.detach().reshape(-1) - state.epoch
        # For equal shares, an epoch may use up to (ranks - 1) samples twice.
        if used.min() < 0 or used.sum() > state.epoch * 5:
            say("WRONG", "samples were used", used.tolist(), "times too often", state.epoch)
            os._exit(9)
        sampler.set_epoch(state.epoch)
        state.check_host_updates()


train(state)
say("end", state.steps, state.epoch, 0, crc())
