"""Train a small CNN on scikit-learn's handwritten digits with torch.distributed over hororing.

    torchrun --nproc-per-node 2 examples/torch_distributed_digits.py    # or by hororun, mpirun
    hororun -np 2 python examples/torch_distributed_digits.py --parallel fsdp

Only the name of the backend differs from a script that uses gloo.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

CHOICES = {
    "ddp": "every rank has the model and the state of the optimizer",
    "zero": "every rank has the model and a part of the state (ZeroRedundancyOptimizer)",
    "fsdp": "every rank has a part of both (fully_shard)",
}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(),
        nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(48 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parallel", choices=CHOICES, default="ddp", help=str(CHOICES))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    args = parser.parse_args()

    dist.init_process_group("hororing")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)  # enough for such small images
    torch.manual_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])
    sampler = DistributedSampler(train, size, rank)

    model = network()
    if args.parallel == "fsdp":
        mesh = dist.init_device_mesh("cpu", (size,))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    rate = 0.002 * size
    if args.parallel == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=rate)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch, labels in DataLoader(train, args.batch_size, sampler=sampler, drop_last=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), labels).backward()
            optimizer.step()

    batch, labels = test.dataset[test.indices[rank::size]]
    with torch.no_grad():
        correct = (model(batch).argmax(dim=1) == labels).sum()
    dist.all_reduce(correct)
    if rank == 0:
        accuracy = correct.item() / len(test)
        print(f"test accuracy {accuracy:.4f} of {args.parallel} on {size} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
