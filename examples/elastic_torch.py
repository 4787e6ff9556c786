"""Train on scikit-learn's handwritten digits with ranks that may die, leave and join.

    hororun -np 3 --min-np 2 python examples/elastic_torch.py

Kill one process while it runs: the others continue, and a new one joins them. docs/elastic.md
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hororing.torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.001, help="per rank")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    train_data = TensorDataset(images[:1500], labels[:1500])

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    hvd.init()  # the others wait for a new process from here to `train`
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(train_data)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

    def scale_rate() -> None:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()

    state.register_reset_callbacks([scale_rate])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        if hvd.rank() == 0:
            print(f"{hvd.size()} ranks from epoch {state.epoch} on", flush=True)
        while state.epoch < args.epochs:
            # The remaining samples, if the epoch was interrupted.
            loader = DataLoader(train_data, args.batch_size, sampler=sampler)
            for index, (inputs, targets) in enumerate(loader):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                sampler.record_batch(index, args.batch_size)
                state.check_host_updates()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    with torch.no_grad():
        correct = (model(images[1500:]).argmax(dim=1) == labels[1500:]).float().mean()
    if hvd.rank() == 0:
        print(f"test accuracy {correct:.4f} after {state.epoch} epochs on {hvd.size()} ranks")


if __name__ == "__main__":
    main()
