"""Train a small CNN on scikit-learn's handwritten digits (1,797 real images of 8 x 8 pixels).

    python examples/torch_digits.py                    # one process
    hororun -np 2 python examples/torch_digits.py       # two

Every line that makes it distributed is marked `# hvd`.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import hororing.torch as hvd  # hvd

# The learning rate is for this many images per step, and grows with them.
REFERENCE_BATCH = 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, help="stop after this many steps")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.003, help=f"for {REFERENCE_BATCH} images")
    parser.add_argument("--warmup-epochs", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--float64", action="store_true", help="compute in double precision")
    parser.add_argument("--loss-log", metavar="FILE", help="write the loss of every step")
    return parser.parse_args()


def datasets(seed: int, dtype: torch.dtype) -> tuple[TensorDataset, TensorDataset]:
    """Four fifths of the images to train, one fifth to test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=dtype).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def shifted(dataset: TensorDataset, seed: int) -> TensorDataset:
    """Move every image by up to one pixel; the same way on every rank."""
    images, labels = dataset.tensors
    windows = nn.functional.pad(images, (1, 1, 1, 1)).unfold(2, 8, 1).unfold(3, 8, 1)
    generator = torch.Generator().manual_seed(seed)
    down, right = torch.randint(0, 3, (2, len(images)), generator=generator)
    return TensorDataset(windows[torch.arange(len(images)), :, down, right], labels)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(),
        nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(48, 48, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(48 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def accuracy(model: nn.Module, dataset: TensorDataset, device: torch.device) -> float:
    """Fraction of correctly classified images; each rank tests its share."""
    images, labels = dataset[hvd.rank() :: hvd.size()]  # hvd
    with torch.no_grad():
        correct = (model(images.to(device)).argmax(dim=1).cpu() == labels).sum()
    correct = hvd.allreduce(correct, name="correct", op=hvd.Sum)  # hvd
    return correct.item() / len(dataset)


def main() -> None:
    args = arguments()
    hvd.init()  # hvd
    device = torch.device("cpu")
    # A GPU for each rank, if there are enough.
    if torch.cuda.device_count() >= hvd.local_size():  # hvd
        torch.cuda.set_device(hvd.local_rank())  # hvd
        device = torch.device("cuda")
    torch.set_num_threads(1)  # enough for such small images
    torch.manual_seed(args.seed)
    torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
    train, test = datasets(args.seed, torch.get_default_dtype())
    sampler = DistributedSampler(train, hvd.size(), hvd.rank(), seed=args.seed)  # hvd
    steps_per_epoch = len(sampler) // args.batch_size

    model = network().to(device)
    batch = args.batch_size * hvd.size()  # hvd
    growth = batch / REFERENCE_BATCH
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr * growth, weight_decay=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # hvd
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # hvd
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # hvd
    steps = args.epochs * steps_per_epoch
    warmup = args.warmup_epochs * steps_per_epoch

    def schedule(step: int) -> float:
        """From args.lr up to the full rate, then down to zero."""
        risen = 1 + (growth - 1) * min(1.0, step / max(1, warmup))
        return risen / growth * min(1.0, (steps - step) / max(1, steps - warmup))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    losses: list[float] = []
    todo = min(steps, args.steps or steps)
    progress = tqdm(total=todo, desc="train", disable=hvd.rank() != 0)  # hvd
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        epoch_data = shifted(train, args.seed + epoch)
        for images, labels in DataLoader(
            epoch_data, args.batch_size, sampler=sampler, drop_last=True
        ):
            if len(losses) == todo:
                break
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(hvd.allreduce(loss.detach(), name="loss").item())  # hvd
            progress.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
            progress.update()
    progress.close()

    result = accuracy(model, test, device)
    if hvd.rank() == 0:  # hvd
        if args.loss_log:
            with open(args.loss_log, "w") as file:
                file.writelines(f"{loss!r}\n" for loss in losses)
        print(f"test accuracy {result:.4f} after {len(losses)} steps on {hvd.size()} ranks")
    hvd.shutdown()  # hvd


if __name__ == "__main__":
    main()
