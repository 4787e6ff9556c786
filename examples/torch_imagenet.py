"""Train a ResNet on ImageNet, or on any images whose folders are their classes.

    hororun -np 2 python examples/torch_imagenet.py --train-dir train --val-dir val

The options are those of Horovod's example. After each epoch rank 0 writes a checkpoint. A restarted
script continues from it, also on another number of ranks.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from resnet import MODELS
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import hororing.torch as hvd  # hvd

IMAGES = {".jpeg", ".jpg", ".png", ".ppm", ".webp"}
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's colours


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--train-dir", required=True, help="a folder per class")
    parser.add_argument("--val-dir", required=True, help="the same folders, other images")
    parser.add_argument("--checkpoint-format", default="checkpoint-{epoch}.pth.tar", help="files")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send 16-bit gradients")
    parser.add_argument("--batches-per-allreduce", type=int, default=1, help="batches per step")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0, help="before sums")
    parser.add_argument("--model", choices=MODELS, default="resnet50", help="network")
    parser.add_argument("--image-size", type=int, default=224, help="pixels per side")
    parser.add_argument("--batch-size", type=int, default=32, help="images per batch and rank")
    parser.add_argument("--val-batch-size", type=int, default=32, help="the same, in validation")
    parser.add_argument("--epochs", type=int, default=90, help="epochs")
    parser.add_argument("--base-lr", type=float, default=0.0125, help="for one batch")
    parser.add_argument("--warmup-epochs", type=float, default=5, help="to the full rate")
    parser.add_argument("--momentum", type=float, default=0.9, help="of SGD")
    parser.add_argument("--wd", type=float, default=0.00005, help="weight decay")
    parser.add_argument("--workers", type=int, default=4, help="processes that read, per rank")
    parser.add_argument("--no-cuda", action="store_true", help="use the CPU")
    parser.add_argument("--seed", type=int, default=42, help="of all random numbers")
    return parser.parse_args()


class ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    """The images below `folder`; the class is the name of the folder directly below it."""

    def __init__(self, folder: str, change: Callable[[Image.Image], Image.Image]) -> None:
        self.classes = sorted(each.name for each in Path(folder).iterdir() if each.is_dir())
        self.images = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted(Path(folder, name).rglob("*"))
            if path.suffix.lower() in IMAGES
        ]
        if not self.images:
            raise FileNotFoundError(f"no images in folders of {folder}: {', '.join(IMAGES)}")
        self.change = change

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.images[index]
        with Image.open(path) as image:
            pixels = np.asarray(self.change(image.convert("RGB")), np.float32) / 255
        pixels = (pixels - np.float32(MEAN)) / np.float32(DEVIATION)
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), label


def random_part(image: Image.Image, size: int) -> Image.Image:
    """A random rectangle of 8 to 100 % of the area, mirrored half the time, at `size` x `size`."""
    area, ratio, left, top, mirror = torch.rand(5).tolist()
    area = (0.08 + 0.92 * area) * image.width * image.height
    ratio = (3 / 4) ** (1 - 2 * ratio)  # from 3:4 to 4:3
    width = min(image.width, (area * ratio) ** 0.5)
    height = min(image.height, (area / ratio) ** 0.5)
    left, top = left * (image.width - width), top * (image.height - height)
    box = (left, top, left + width, top + height)
    part = image.resize((size, size), Image.Resampling.BILINEAR, box)
    return ImageOps.mirror(part) if mirror < 0.5 else part


def center(image: Image.Image, size: int) -> Image.Image:
    """The square in the middle, without an eighth of the shorter side, at `size` x `size`."""
    return ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR, bleed=0.0625)


def validate(model: nn.Module, loader: DataLoader, device: torch.device) -> tuple[float, float]:
    """The loss and the accuracy over all images of all ranks."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for images, labels in loader:
            scores, labels = model(images.to(device)), labels.to(device)
            loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
            right = (scores.argmax(dim=1) == labels).sum()
            sums += torch.tensor([loss.item(), right.item(), len(labels)])
    loss, right, count = hvd.allreduce(sums, name="validation", op=hvd.Sum).tolist()  # hvd
    return loss / count, right / count


def main() -> None:
    args = arguments()
    hvd.init()  # hvd
    cuda = torch.cuda.is_available() and not args.no_cuda
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")  # hvd
    torch.manual_seed(args.seed)
    # Workers that are not forked receive a pickle, so a lambda would not do.
    train = ImageFolder(args.train_dir, partial(random_part, size=args.image_size))
    test = ImageFolder(args.val_dir, partial(center, size=args.image_size))
    if test.classes != train.classes:
        raise ValueError(f"{args.train_dir} and {args.val_dir} have different folders")
    passes = args.batches_per_allreduce
    sampler = DistributedSampler(train, hvd.size(), hvd.rank(), seed=args.seed)  # hvd
    loader = DataLoader(
        train, args.batch_size, sampler=sampler, num_workers=args.workers, drop_last=True
    )
    share = torch.utils.data.Subset(test, range(hvd.rank(), len(test), hvd.size()))  # hvd
    test_loader = DataLoader(share, args.val_batch_size, num_workers=args.workers)
    steps_per_epoch = len(loader) // passes
    if steps_per_epoch == 0:
        raise ValueError(f"{len(train)} images are too few for a step of all ranks")

    model = MODELS[args.model](len(train.classes)).to(device)
    # Adasum keeps the rate of one rank; averages allow a larger one for more ranks.
    growth = passes * (1 if args.use_adasum else hvd.size())  # hvd
    optimizer = hvd.DistributedOptimizer(  # hvd
        torch.optim.SGD(
            model.parameters(), args.base_lr * growth, args.momentum, weight_decay=args.wd
        ),
        named_parameters=model.named_parameters(),  # hvd
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,  # hvd
        backward_passes_per_step=passes,  # hvd
        op=hvd.Adasum if args.use_adasum else hvd.Average,  # hvd
        gradient_predivide_factor=args.gradient_predivide_factor,  # hvd
    )

    saves = {n: Path(args.checkpoint_format.format(epoch=n)) for n in range(1, args.epochs + 1)}
    done = max((n for n, path in saves.items() if path.exists()), default=0)
    done = hvd.broadcast_object(done)  # hvd: only rank 0 needs the files
    if done and hvd.rank() == 0:  # hvd
        saved = torch.load(saves[done], map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # hvd
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # hvd

    def rate(epochs: float) -> float:
        """From the rate of one batch up to the full one; a tenth after epochs 30, 60 and 80."""
        warm = min(1.0, epochs / max(args.warmup_epochs, 1e-9))
        grown = args.base_lr * (1 + (growth - 1) * warm)
        return grown * 0.1 ** sum(epochs >= drop for drop in (30, 60, 80))

    for epoch in range(done, args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        batches = iter(loader)
        total = torch.zeros(())
        steps = tqdm(range(steps_per_epoch), f"epoch {epoch + 1}", disable=hvd.rank() != 0)  # hvd
        for step in steps:
            for group in optimizer.param_groups:
                group["lr"] = rate(epoch + step / steps_per_epoch)
            optimizer.zero_grad()
            for images, labels in itertools.islice(batches, passes):
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
                (loss / passes).backward()  # gradients add up over the passes
                total += loss.item() / passes / steps_per_epoch
            optimizer.step()
        train_loss = hvd.allreduce(total, name="loss").item()  # hvd
        test_loss, accuracy = validate(model, test_loader, device)
        if hvd.rank() == 0:  # hvd
            print(f"epoch {epoch + 1}: loss {train_loss:.3f}, validation loss {test_loss:.3f}, "
                  f"validation accuracy {accuracy:.4f}")  # fmt: skip
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            new = saves[epoch + 1].with_suffix(".new")
            torch.save(saved, new)
            new.replace(saves[epoch + 1])  # the file is never incomplete
    hvd.shutdown()  # hvd


if __name__ == "__main__":
    main()
