"""Train a small CNN on handwritten digits by hierarchical SGD, with ranks that are late at random.

    mpirun -np 4 python examples/hierarchical_sgd_digits.py
    mpirun -np 4 python examples/hierarchical_sgd_digits.py --resume-at 30
    mpirun -np 4 python examples/hierarchical_sgd_digits.py --persistent     # where it cannot help

It trains twice, with the same data and the same delays: synchronously, and with pairs of ranks that
average their weights every 2 steps and all of them every 8th. The last lines say what that saved.
"""

import argparse
import time
import warnings

import torch
from sklearn.datasets import load_digits
from torch import nn

import hororing.torch as hvd
from hororing.stragglers import StragglerInjector
from hororing.torch.optim import HierarchicalSGD


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--warmup-steps", type=int, default=16, help="synchronous ones")
    parser.add_argument("--batch-size", type=int, default=16, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--pair", type=int, default=2, help="ranks that average every 2 steps")
    parser.add_argument("--delay-steps", type=int, default=0, help="averages run while we train")
    parser.add_argument("--probability", type=float, default=0.1, help="that a rank is late")
    parser.add_argument("--delay", type=float, default=0.1, help="how late, in seconds")
    parser.add_argument("--persistent", action="store_true", help="rank 0 is late in every step")
    parser.add_argument("--compute", type=float, default=0.01, help="seconds of a step, at least")
    parser.add_argument("--resume-at", type=int, help="save and load again after this step")
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


def make_optimizer(
    model: nn.Module, args: argparse.Namespace, synchronous: bool
) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    if synchronous:
        return hvd.DistributedOptimizer(optimizer, model.named_parameters())
    pair = args.pair if hvd.size() % args.pair == 0 else 1
    return HierarchicalSGD(
        optimizer,
        model.named_parameters(),
        named_buffers=model.named_buffers(),
        period_group_size_dict={2: pair, 8: "world"},
        warmup_steps=args.warmup_steps,
        gradient_groups=None,  # on several hosts: "host"
        delay_steps=args.delay_steps,
    )


def train(args: argparse.Namespace, synchronous: bool) -> tuple[float, float, float]:
    """Return seconds per step, and loss and accuracy on the test images."""
    images, labels, test_images, test_labels = datasets(args.seed)
    model = network(args.seed)
    optimizer = make_optimizer(model, args, synchronous)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    late = StragglerInjector(args.probability, args.delay, seed=args.seed)  # alike in both runs
    if args.persistent:
        late = StragglerInjector(1.0, args.delay, ranks=[0])
    seconds = []
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
        if step + 1 == args.resume_at and not synchronous:
            # Every rank saves and loads its own: weights differ between averages.
            saved = model.state_dict(), optimizer.state_dict()
            model = network(0)
            model.load_state_dict(saved[0])
            optimizer = make_optimizer(model, args, synchronous)
            optimizer.load_state_dict(saved[1])

    begin = time.perf_counter()
    if not synchronous:
        optimizer.final_average()  # before evaluation; on all ranks
    hvd.barrier()
    # Until the latest rank is through.
    total = sum(seconds) + time.perf_counter() - begin
    model.eval()
    with torch.no_grad():
        outputs = model(test_images)
        loss = nn.functional.cross_entropy(outputs, test_labels).item()
        accuracy = (outputs.argmax(dim=1) == test_labels).float().mean().item()
    return total / args.steps, loss, accuracy


def main() -> None:
    args = arguments()
    hvd.init()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="HierarchicalSGD: gradient_groups")
    plain_s, plain_loss, plain_accuracy = train(args, synchronous=True)
    ours_s, loss, accuracy = train(args, synchronous=False)
    if hvd.rank() == 0:
        print(f"synchronous:  {plain_s * 1e3:6.1f} ms per step, test loss {plain_loss:.4f}")
        print(f"hierarchical: {ours_s * 1e3:6.1f} ms per step, test loss {loss:.4f}")
        print(f"test accuracy {plain_accuracy:.4f} and {accuracy:.4f}")
        saved = 1 - ours_s / plain_s
        print(f"saved {saved:.0%} of the time in {args.steps} steps on {hvd.size()} ranks")
    hvd.shutdown()


if __name__ == "__main__":
    main()
