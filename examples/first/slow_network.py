"""A quarter of the bytes: hororun -np 2 python slow_network.py"""

import torch

import hororing.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(1000, 1000)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1e-3), compression=hvd.Compression.int8
)  # errors of rounding are sent in later steps
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for _ in range(20):
    optimizer.zero_grad()
    loss = model(torch.randn(32, 1000)).square().mean()
    loss.backward()
    optimizer.step()
print(f"rank {hvd.rank()} of {hvd.size()}: loss {loss.item():.3f}")
