"""The ranks of test_timeline.py."""

from __future__ import annotations

import os
import sys


def train() -> None:
    """Train a model that is large enough for a long backward pass."""
    import torch

    import hororing.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    layers = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(BATCH, WIDTH)).square().mean().backward()
        optimizer.step()
    hvd.allgather(torch.ones(hvd.rank() + 1, 2), name=ROWS)
    hvd.barrier()


LAYERS, WIDTH, BATCH, STEPS = 8, 384, 512, 6
ROWS = 'rows of "every" rank\n'


def work_on() -> None:
    """Run collectives until the job is killed."""
    import numpy as np

    import hororing.numpy as hvd

    hvd.init()
    print("pid", os.getpid(), flush=True)
    step = 0
    while True:
        hvd.allreduce(np.ones(1000), name=f"tensor {step % 50}")
        step += 1


if __name__ == "__main__":
    globals()[sys.argv[1]]()
