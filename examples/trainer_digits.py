"""Train a small vision transformer on scikit-learn's handwritten digits with Transformers' Trainer.

    hororun -np 2 python examples/trainer_digits.py     # or by torchrun, mpirun

The model is built from its configuration: nothing is downloaded.
"""

import argparse
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.utils.data import Dataset, random_split
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification


class Digits(Dataset):
    def __init__(self) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        self.labels = torch.tensor(digits.target)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def accuracy(outcome) -> dict[str, float]:
    return {"accuracy": float(np.mean(outcome.predictions.argmax(-1) == outcome.label_ids))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    args = parser.parse_args()

    dist.init_process_group("hororing")  # before TrainingArguments, which would choose gloo
    torch.set_num_threads(1)  # enough for such small images
    torch.manual_seed(1)
    train, test = random_split(Digits(), [0.8, 0.2])
    model = ViTForImageClassification(
        ViTConfig(
            image_size=8, patch_size=2, num_channels=1, num_labels=10, hidden_size=48,
            num_hidden_layers=3, num_attention_heads=4, intermediate_size=96,
        )
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            use_cpu=True,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch_size,
            learning_rate=0.002 * dist.get_world_size(),
            warmup_steps=20,
            ddp_find_unused_parameters=False,
            save_strategy="no",
            report_to="none",
            seed=1,
        )
        trainer = Trainer(
            model, settings, train_dataset=train, eval_dataset=test, compute_metrics=accuracy
        )
        trainer.train()
        figures = trainer.evaluate()
    if dist.get_rank() == 0:
        print(
            f"test accuracy {figures['eval_accuracy']:.4f} of {len(test)} images "
            f"on {settings.world_size} ranks by {dist.get_backend()}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
