"""Train a small CNN on scikit-learn's handwritten digits with Lightning and torchmetrics.

python examples/lightning_digits.py --ranks 2       # Lightning starts the ranks
torchrun --nproc-per-node 2 examples/lightning_digits.py --ranks 2
"""

import argparse

import lightning
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Classifier(lightning.LightningModule):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.layers = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(),
            nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(48 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
        # Counts on its rank, and sums over the ranks in `compute`.
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(10, average="micro")

    def training_step(self, batch, index) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def test_step(self, batch, index) -> None:
        images, labels = batch
        self.accuracy.update(self.layers(images), labels)

    def on_test_epoch_end(self) -> None:
        accuracy, backend = self.accuracy.compute(), dist.get_backend()
        self.print(f"test accuracy {accuracy:.4f} on {self.trainer.world_size} ranks by {backend}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    args = parser.parse_args()

    torch.set_num_threads(1)  # enough for such small images
    lightning.seed_everything(1)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=args.ranks,
        strategy=DDPStrategy(process_group_backend="hororing"),
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier(0.002 * args.ranks)
    trainer.fit(model, DataLoader(train, args.batch_size, shuffle=True))
    trainer.test(model, DataLoader(test, args.batch_size))


if __name__ == "__main__":
    main()
