"""A training script for Horovod: accumulation, clipping, 16-bit gradients, checkpoint and resume.

It knows nothing of hororing. At the end it checks that all ranks hold the same weights, and that
the loss has fallen.
"""

import argparse
import os

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--base-lr", type=float, default=0.01)
parser.add_argument("--max-norm", type=float, default=1.0)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--checkpoint", required=True)


class Metric:
    """Average over batches and ranks."""

    def __init__(self, name):
        self.name = name
        self.sum = torch.tensor(0.0)
        self.count = 0

    def update(self, value):
        self.sum += hvd.allreduce(value.detach(), name=self.name)
        self.count += 1

    @property
    def average(self):
        return (self.sum / self.count).item()


def blobs(samples=640, features=16, classes=4):
    generator = torch.Generator().manual_seed(0)
    centers = 2 * torch.randn(classes, features, generator=generator)
    labels = torch.randint(classes, (samples,), generator=generator)
    return TensorDataset(
        centers[labels] + torch.randn(samples, features, generator=generator), labels
    )


def train_epoch(args, epoch, model, optimizer, sampler, loader):
    sampler.set_epoch(epoch)
    train_loss, train_accuracy = Metric("train_loss"), Metric("train_accuracy")
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        # A batch has several passes, of which only the last one communicates.
        pieces = list(
            zip(inputs.split(args.batch_size), labels.split(args.batch_size), strict=True)
        )
        for piece, target in pieces:
            output = model(piece)
            loss = nn.functional.cross_entropy(output, target)
            train_loss.update(loss)
            train_accuracy.update((output.argmax(dim=1) == target).float().mean())
            (loss / len(pieces)).backward()
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        assert torch.isfinite(norm)
        with optimizer.skip_synchronize():
            optimizer.step()
    return train_loss.average, train_accuracy.average


def main():
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(hvd.rank())  # ranks begin with different weights
    torch.set_num_threads(1)

    dataset = blobs()
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(
        dataset, batch_size=args.batch_size * args.batches_per_allreduce, sampler=sampler
    )
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=args.base_lr * args.batches_per_allreduce * hvd.size(),
        momentum=0.9,
        weight_decay=1e-4,
    )
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Average,
    )

    # Only rank 0 has the checkpoint, and tells the others where to continue.
    history = []
    if hvd.rank() == 0 and os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        history = saved["history"]
    history = hvd.broadcast_object(history, root_rank=0, name="history")
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    resumed = len(history)

    for epoch in range(resumed, args.epochs):
        loss, accuracy = train_epoch(args, epoch, model, optimizer, sampler, loader)
        history.append(loss)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.3f}", flush=True)
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "history": history,
                },
                args.checkpoint,
            )

    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everywhere = hvd.allgather(weights.unsqueeze(0), name="weights")
    assert everywhere.shape[0] == hvd.size()
    assert torch.equal(everywhere, weights.expand_as(everywhere)), "ranks hold different weights"
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    mine = torch.stack([momentum.norm() for momentum in momenta])
    assert torch.equal(hvd.broadcast(mine, root_rank=0, name="momenta"), mine)
    assert history[-1] < 0.5 * history[0], history
    assert hvd.allgather_object(history) == [history] * hvd.size()
    if hvd.rank() == 0:
        print(f"done: {len(history)} epochs, {resumed} of them resumed, {hvd.size()} ranks")


if __name__ == "__main__":
    main()
