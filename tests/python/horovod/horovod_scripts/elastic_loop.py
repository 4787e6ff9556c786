"""An elastic training script for Horovod: it knows nothing of hororing.

At the end it checks that all ranks hold the same weights, and that the loss has fallen.
"""

import argparse

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.elastic.sampler import ElasticSampler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--batches-per-commit", type=int, default=5)
args = parser.parse_args()

hvd.init()
assert issubclass(HorovodInternalError, RuntimeError)
torch.manual_seed(3)
inputs = torch.randn(600, 6)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
base_lr = 0.01
optimizer = torch.optim.SGD(model.parameters(), lr=base_lr * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = ElasticSampler(data, shuffle=True)


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = base_lr * hvd.size()


@hvd.elastic.run
def train(state):
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks from epoch {state.epoch} on", flush=True)
    while state.epoch < args.epochs:
        for batch, (x, y) in enumerate(DataLoader(data, args.batch_size, sampler=sampler)):
            state.batch = batch
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            state.train_sampler.record_batch(batch, args.batch_size)
            if state.batch % args.batches_per_commit == 0:
                state.commit()
            else:
                state.check_host_updates()
        mean = hvd.allreduce(loss.detach(), name="loss").item()
        state.losses = [*state.losses, mean]
        state.epoch += 1
        state.train_sampler.set_epoch(state.epoch)
        state.commit()


state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0, losses=[], train_sampler=sampler)
state.register_reset_callbacks([on_state_reset])
train(state)
weights = torch.cat([p.detach().ravel() for p in model.parameters()])
everybody = hvd.allgather(weights.unsqueeze(0), name="weights")
assert (everybody == everybody[0]).all()
assert len(state.losses) == args.epochs
assert state.losses[-1] < 0.5 * state.losses[0], state.losses
if hvd.rank() == 0:
    print(f"done after {state.epoch} epochs on {hvd.size()} ranks")
