"""A script for DDP, with one word changed: hororun -np 2 python ddp_script.py"""

import torch
import torch.distributed as dist

dist.init_process_group("hororing")  # instead of "gloo" or "nccl"
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(200):
    x = torch.randn(32, 8)  # other data on each rank
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: loss {loss.item():.6f}")
dist.destroy_process_group()
