"""Train a small CNN on scikit-learn's handwritten digits with Hugging Face Accelerate.

    hororun -np 2 python examples/accelerate_digits.py
    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_digits.py

Accelerate itself would choose gloo, and refuses the names of other backends on the CPU; it uses an
existing process group. docs/torch_distributed.md has more ways to start it.
"""

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(),
        nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(48 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    args = parser.parse_args()

    dist.init_process_group("hororing")
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)  # enough for such small images
    set_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])

    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002 * accelerator.num_processes)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(train, args.batch_size, shuffle=True), DataLoader(test, 64)
    )
    for _ in range(args.epochs):
        for batch, labels in train_loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(batch), labels))
            optimizer.step()

    correct = total = 0
    with torch.no_grad():
        for batch, labels in test_loader:
            found = model(batch).argmax(dim=1)
            found, labels = accelerator.gather_for_metrics((found, labels))
            correct += (found == labels).sum().item()
            total += len(labels)
    accelerator.print(
        f"test accuracy {correct / total:.4f} of {total} images "
        f"on {accelerator.num_processes} ranks by {dist.get_backend()}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
