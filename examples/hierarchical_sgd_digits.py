"""Train a small CNN on handwritten digits by hierarchical SGD, with ranks that are late at random.

    hororun -np 4 python examples/hierarchical_sgd_digits.py
    hororun -np 4 python examples/hierarchical_sgd_digits.py --resume-at 30
    hororun -np 4 python examples/hierarchical_sgd_digits.py --persistent     # where it cannot help

It trains twice, with the same data and the same delays: synchronously, and with pairs of ranks that
average their weights every 2 steps and all of them every 8th. The last lines show the time saved.
`--ways` has more: all of them average every 8th step ("local"), and pairs as above, whose averages
run while training continues ("delayed").
"""

import argparse
import copy
import time
import warnings

import torch
from sklearn.datasets import load_digits
from torch import nn

import hororing.torch as hvd
from hororing.toolkit.stragglers import StragglerInjector
from hororing.toolkit.torch.optim import HierarchicalSGD
from hororing.toolkit.tracking import RunRecord

WAYS = ["synchronous", "local", "hierarchical", "delayed"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["synchronous", "hierarchical"])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--warmup-steps", type=int, default=16, help="synchronous ones")
    parser.add_argument("--batch-size", type=int, default=16, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--pair", type=int, default=2, help="ranks that average every 2 steps")
    parser.add_argument("--delay-steps", type=int, default=1, help="that delayed averages take")
    parser.add_argument("--probability", type=float, default=0.1, help="that a rank is late")
    parser.add_argument("--delay", type=float, default=0.1, help="how late, in seconds")
    parser.add_argument("--persistent", action="store_true", help="rank 0 is late in every step")
    parser.add_argument("--compute", type=float, default=0.01, help="seconds of a step, at least")
    parser.add_argument("--resume-at", type=int, help="save and load again after this step")
    parser.add_argument("--record", help="write the loss after every 8 steps into this folder")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def datasets(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels: four fifths to train, one fifth to test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    return images[train], labels[train], images[test], labels[test]


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


def make_optimizer(model: nn.Module, args: argparse.Namespace, way: str) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    if way == "synchronous":
        return hvd.DistributedOptimizer(optimizer, model.named_parameters())
    pair = args.pair if hvd.size() % args.pair == 0 else 1
    return HierarchicalSGD(
        optimizer,
        model.named_parameters(),
        named_buffers=model.named_buffers(),
        period_group_size_dict={8: "world"} if way == "local" else {2: pair, 8: "world"},
        warmup_steps=args.warmup_steps,
        gradient_groups=None,  # on several hosts: "host"
        delay_steps=args.delay_steps if way == "delayed" else 0,
    )


def write_record(
    args: argparse.Namespace, way: str, snapshots: list, test: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Log time, and loss and accuracy of the ranks' mean weights, for each snapshot of a rank."""
    config = {**vars(args), "way": way, "ranks": hvd.size()}
    model = network(args.seed)
    with RunRecord(args.record, config, seed=args.seed) as record:
        for step, seconds, state in snapshots:
            for tensor in state.values():
                if tensor.is_floating_point():
                    hvd.allreduce_(tensor)
            model.load_state_dict(state)
            loss, accuracy = test_results(model, *test)
            latest = hvd.allreduce(torch.tensor(seconds), op=hvd.Max).item()
            record.log(step, {"loss": loss, "accuracy": accuracy, "seconds": latest})


def test_results(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> tuple[float, float]:
    """Loss and accuracy."""
    model.eval()
    with torch.no_grad():
        outputs = model(images)
        loss = nn.functional.cross_entropy(outputs, labels).item()
        return loss, (outputs.argmax(dim=1) == labels).float().mean().item()


def train(args: argparse.Namespace, way: str) -> tuple[float, float, float]:
    """Return seconds per step, and loss and accuracy on the test images."""
    images, labels, test_images, test_labels = datasets(args.seed)
    model = network(args.seed)
    optimizer = make_optimizer(model, args, way)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    late = StragglerInjector(args.probability, args.delay, seed=args.seed)  # the same in both runs
    if args.persistent:
        late = StragglerInjector(1.0, args.delay, ranks=[0])
    seconds, snapshots = [], []
    for step in range(args.steps):
        order = torch.Generator().manual_seed(args.seed + step)
        batch = torch.randperm(len(labels), generator=order)[hvd.rank() :: hvd.size()]
        batch = batch[: args.batch_size]
        begin = time.perf_counter()
        time.sleep(args.compute)
        late()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        if args.record and step % 8 == 7:  # tested later, outside of the measured time
            snapshots.append((step + 1, sum(seconds), copy.deepcopy(model.state_dict())))
        if step + 1 == args.resume_at and way != "synchronous":
            # Every rank saves and loads its own file: weights differ between averages.
            saved = model.state_dict(), optimizer.state_dict()
            model = network(0)
            model.load_state_dict(saved[0])
            optimizer = make_optimizer(model, args, way)
            optimizer.load_state_dict(saved[1])

    begin = time.perf_counter()
    if way != "synchronous":
        optimizer.final_average()  # before evaluation; on all ranks
    hvd.barrier()
    # Until the last rank has finished.
    total = sum(seconds) + time.perf_counter() - begin
    if args.record:
        write_record(args, way, snapshots, (test_images, test_labels))
    return total / args.steps, *test_results(model, test_images, test_labels)


def main() -> None:
    args = arguments()
    hvd.init()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="HierarchicalSGD: gradient_groups")
    found = [train(args, way) for way in args.ways]
    if hvd.rank() == 0:
        for way, (seconds, loss, _) in zip(args.ways, found, strict=True):
            print(f"{way + ':':<13} {seconds * 1e3:6.1f} ms per step, test loss {loss:.4f}")
        print("test accuracy " + " and ".join(f"{accuracy:.4f}" for _, _, accuracy in found))
        saved = 1 - found[-1][0] / found[0][0]  # the last way's, against the first
        print(f"saved {saved:.0%} of the time in {args.steps} steps on {hvd.size()} ranks")
    hvd.shutdown()


if __name__ == "__main__":
    main()
