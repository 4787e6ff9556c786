"""Kill a process while it runs: hororun -np 3 --min-np 2 python machines_vanish.py"""

import os
import time

import torch

import hororing.torch as hvd

hvd.init()
state = hvd.elastic.TorchState(step=0, total=0.0)


@hvd.elastic.run
def train(state):
    while state.step < 150:
        state.total += hvd.allreduce(torch.ones(1), op=hvd.Sum, name="gradient").item()
        state.step += 1
        state.commit()
        print(f"step {state.step} on {hvd.size()} ranks; try kill -9 {os.getpid()}", flush=True)
        time.sleep(0.1)


train(state)
