"""Tune the network of torch_digits.py: 32 trials, one per rank at a time.

    hororun -np 4 python examples/search_digits.py

The configuration of torch_digits.py is the first trial.
"""

import argparse

import torch
from torch import nn
from torch_digits import datasets, network, shifted

import hororing.torch as hvd
from hororing.toolkit.search import Range, Trial, search

DEFAULT = {"lr": 0.003, "batch": 32, "weight_decay": 0.05, "smoothing": 0.0}
SPACE = {
    "lr": Range(3e-4, 3e-2, log=True),
    "batch": [16, 32, 64],
    "weight_decay": Range(1e-3, 0.5, log=True),
    "smoothing": Range(0.0, 0.3),
}


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--ranks-per-trial", type=int, default=1)
    parser.add_argument("--folder", help="of the records of trials")
    args = parser.parse_args()
    hvd.init(process_sets="dynamic")
    torch.set_num_threads(1)
    data, _ = datasets(seed=1, dtype=torch.float32)
    images, labels = data.tensors
    held_out = len(labels) // 4  # trials are compared on these
    train_data = torch.utils.data.TensorDataset(images[held_out:], labels[held_out:])

    def train(trial: Trial) -> float:
        ranks, params = trial.process_set, trial.params
        torch.manual_seed(trial.seed)
        model = network()
        optimizer = torch.optim.AdamW(
            model.parameters(), params["lr"], weight_decay=params["weight_decay"]
        )
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=ranks)
        criterion = nn.CrossEntropyLoss(label_smoothing=params["smoothing"])
        mine = slice(ranks.rank(), None, ranks.size())
        result = 0.0
        for epoch in range(args.epochs):
            for group in optimizer.param_groups:
                group["lr"] = params["lr"] * (1 - epoch / args.epochs)
            epoch_images, epoch_labels = shifted(train_data, trial.seed + epoch).tensors
            order = torch.randperm(len(epoch_labels))
            for chosen in order.split(params["batch"] * ranks.size())[:-1]:
                optimizer.zero_grad()
                loss = criterion(model(epoch_images[chosen[mine]]), epoch_labels[chosen[mine]])
                loss.backward()
                optimizer.step()
            result = accuracy(model, images[:held_out], labels[:held_out])
            trial.report(epoch, result)
        return result

    found = search(
        SPACE, train, trials=args.trials, ranks_per_trial=args.ranks_per_trial, first=[DEFAULT],
        scheduler="median", maximize=True, folder=args.folder, name="digits",
    )  # fmt: skip
    if hvd.rank() == 0:
        ends = [each.status for each in found.trials]
        default = next(each for each in found.trials if each.number == 0)
        print(f"{ends.count('completed')} trials completed, {ends.count('pruned')} stopped early")
        print(f"busy {found.busy:.1%}, next trial within {1000 * found.gap_s:.1f} ms")
        print(f"default {default.value:.4f}, best {found.value:.4f} with {found.params}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
