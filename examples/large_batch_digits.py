"""Train on scikit-learn's handwritten digits with tools for large batches (docs/large_batch.md).

    python examples/large_batch_digits.py                    # one process
    hororun -np 4 python examples/large_batch_digits.py       # four
    python examples/large_batch_digits.py --optimizer sgd --lr 0.1 --record runs   # for comparison

LARS; linear warm-up and polynomial decay by the effective batch; batch-norm over groups of ranks;
bfloat16 weights and activations, rounded at random; exact evaluation. Every line that makes it
distributed is marked `# hvd`.
"""

import argparse
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import hororing.torch as hvd  # hvd
from hororing.toolkit.large_batch.groups import choose_group_size  # hvd
from hororing.toolkit.large_batch.schedules import WarmupPolynomial, effective_batch
from hororing.toolkit.torch.batch_norm import average_running_statistics  # hvd
from hororing.toolkit.torch.data import ShardSampler, correct, evaluate, masked_loader  # hvd
from hororing.toolkit.torch.optim import (
    LARS,
    ScheduleLR,
    StochasticCast,
    StochasticRounding,
    parameter_groups,
    with_float32_update,
    zero_last_gammas,
)
from hororing.toolkit.tracking import RunRecord

# The learning rate is for this many images per update, and grows with them.
REFERENCE_BATCH = 256


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--steps", type=int, help="stop after this many updates")
    parser.add_argument("--batch-size", type=int, default=45, help="images per pass and rank")
    parser.add_argument("--accumulation", type=int, default=1, help="passes per update")
    parser.add_argument("--optimizer", choices=["lars", "sgd"], default="lars")
    parser.add_argument("--lr", type=float, default=0.5, help=f"for {REFERENCE_BATCH} images")
    parser.add_argument("--trust", type=float, default=0.01, help="trust coefficient of LARS")
    parser.add_argument("--warmup-epochs", type=float, default=5.0)
    parser.add_argument("--weight-decay", type=float, default=5e-5)
    parser.add_argument("--record", help="test after every epoch, and write it into this folder")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def datasets(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Four fifths of the images to train, one fifth to test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class Block(nn.Module):
    """Two convolutions in bfloat16 with batch-norm in float32, around which the input passes."""

    def __init__(self, channels: int, seed: int, number: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False, dtype=torch.bfloat16)
            for _ in range(2)
        )
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.round1 = StochasticCast(torch.bfloat16, seed=seed, tensor=2 * number)
        self.round2 = StochasticCast(torch.bfloat16, seed=seed, tensor=2 * number + 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.round1(self.bn1(self.conv1(inputs).float()).relu())
        return self.round2((inputs.float() + self.bn2(self.conv2(hidden).float())).relu())


class Network(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 24, 3, padding=1, dtype=torch.bfloat16)
        self.block1, self.block2 = Block(24, seed, 0), Block(24, seed, 1)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(24 * 4 * 4, 10, dtype=torch.bfloat16)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.block1(self.stem(images.bfloat16()))
        return self.head(self.block2(self.pool(hidden)).flatten(1)).float()


def make_optimizer(model: nn.Module, args: argparse.Namespace, rate: float):
    rounding = StochasticRounding(args.seed)
    groups = parameter_groups(model, args.weight_decay)
    if args.optimizer == "lars":
        return LARS(groups, lr=rate, trust_coefficient=args.trust, rounding=rounding)
    plain = [{"params": each["params"], "weight_decay": each["weight_decay"]} for each in groups]
    return with_float32_update(torch.optim.SGD(plain, lr=rate, momentum=0.9), rounding=rounding)


def test_results(model: nn.Module, test: TensorDataset) -> tuple[float, float, int]:
    """Loss, accuracy and the number of right answers, the same on all ranks."""
    average_running_statistics(model)  # hvd
    loss = partial(nn.functional.cross_entropy, reduction="none")
    results = evaluate(model, masked_loader(test, 100), {"correct": correct, "loss": loss})  # hvd
    return results["loss"].mean, results["correct"].mean, results["correct"].total


def main() -> None:
    args = arguments()
    hvd.init()  # hvd
    torch.set_num_threads(1)  # enough for such small images
    torch.manual_seed(args.seed)
    train, test = datasets(args.seed)
    sampler = ShardSampler(train, seed=args.seed, remainder="drop")  # hvd

    model = Network(args.seed)
    zero_last_gammas(model, [r"block\d\.bn2"])
    group_size = choose_group_size(args.batch_size)  # hvd
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(model, group_size=group_size)  # hvd
    batch = effective_batch(args.batch_size, args.accumulation, hvd.size())  # hvd
    schedule = WarmupPolynomial.for_batch(
        batch, samples=len(train), epochs=args.epochs, base_rate=args.lr, start=0.0,
        reference_batch=REFERENCE_BATCH, warmup_epochs=args.warmup_epochs,
    )  # fmt: skip
    optimizer = make_optimizer(model, args, schedule.peak)
    optimizer = hvd.DistributedOptimizer(  # hvd
        optimizer, model.named_parameters(), backward_passes_per_step=args.accumulation
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # hvd
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # hvd
    scheduler = ScheduleLR(optimizer, schedule)
    record = args.record and RunRecord(args.record, {**vars(args), "batch": batch}, seed=args.seed)

    todo = min(schedule.total_steps, args.steps or schedule.total_steps)
    progress = tqdm(total=todo, desc="train", disable=hvd.rank() != 0)  # hvd
    done = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
        whole = len(loader) - len(loader) % args.accumulation  # passes that make updates
        for number, (images, labels) in enumerate(loader):
            if done == todo or number == whole:
                break
            loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
            (loss / args.accumulation).backward()
            if number % args.accumulation == args.accumulation - 1:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                done += 1
                progress.update()
        if record:
            loss, accuracy, _ = test_results(model, test)
            record.log(epoch + 1, {"loss": loss, "accuracy": accuracy, "steps": done})
    progress.close()

    _, accuracy, count = test_results(model, test)
    if record:
        record.close()
    if hvd.rank() == 0:  # hvd
        print(f"effective batch {batch}, peak rate {schedule.peak:.4g}, {count} correct")
        print(f"test accuracy {accuracy:.4f} after {done} steps on {hvd.size()} ranks")
    hvd.shutdown()  # hvd


if __name__ == "__main__":
    main()
