"""The effect of gradient compression on a model: loss and accuracy, by method, over seeds.

    hororun -np 4 python benchmarks/compression_accuracy.py --json compression_accuracy.json
    python benchmarks/compression_accuracy.py --show compression_accuracy.json     # table and plot

Two tasks. Digits: a CNN of 120,000 parameters on scikit-learn's 1,797 digits, a fifth of them for
testing. Text: a GRU of 280,000 parameters predicts the next character of Python's reference texts
(`pydoc_data.topics`), a tenth of them for testing. All methods of a seed start from the same
weights and see the same batches; the learning rates are those that suit `none`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from record import arguments, machine
from sklearn.datasets import load_digits
from torch import nn

import hororing.torch as hvd

METHODS: dict[str, Any] = {
    "none": hvd.Compression.none,
    "fp16": hvd.Compression.fp16,
    "int8": hvd.Compression.int8,
    "powersgd, rank 4": hvd.Compression.powersgd(rank=4),
    "powersgd, rank 1": hvd.Compression.powersgd(rank=1),
    "topk, 10 %": hvd.Compression.topk(ratio=0.1),
    "topk, 1 %": hvd.Compression.topk(ratio=0.01),
}
Batch = tuple[torch.Tensor, torch.Tensor]
Batches = Callable[[int], Batch]  # from the number of a step, for this rank
WINDOW = 64  # characters


class Recurrent(nn.Module):
    """Predicts each next character of a text."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, 64)
        self.gru = nn.GRU(64, 256, batch_first=True)
        self.out = nn.Linear(256, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Logits, of shape (batch, characters, window)."""
        out: torch.Tensor = self.out(self.gru(self.embed(text))[0])
        return out.transpose(1, 2)


def digits(seed: int) -> tuple[nn.Module, Batches, Batch]:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    model = nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(768, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip

    def batch(step: int) -> Batch:
        generator = torch.Generator().manual_seed(seed * 100_003 + step * 64 + hvd.rank())
        chosen = train[torch.randint(len(train), (16,), generator=generator)]
        return images[chosen], labels[chosen]

    return model, batch, (images[test], labels[test])


def text(seed: int) -> tuple[nn.Module, Batches, Batch]:
    whole = "".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(whole))
    index = {character: number for number, character in enumerate(alphabet)}
    codes = torch.tensor([index[character] for character in whole])
    split = len(codes) * 9 // 10

    def windows(starts: torch.Tensor) -> Batch:
        rows = torch.stack([codes[start : start + WINDOW + 1] for start in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]

    def batch(step: int) -> Batch:
        generator = torch.Generator().manual_seed(seed * 100_003 + step * 64 + hvd.rank())
        return windows(torch.randint(split - WINDOW - 1, (8,), generator=generator))

    tested = torch.arange(split, len(codes) - WINDOW - 1, (len(codes) - split) // 256)
    return Recurrent(len(alphabet)), batch, windows(tested)


# The function that makes the task; the number of steps; the optimizer.
TASKS: dict[str, tuple[Any, int, Callable[[Any], torch.optim.Optimizer]]] = {
    "digits": (digits, 300, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "text": (text, 300, lambda p: torch.optim.Adam(p, lr=0.004)),
}


def train(task: str, method: str, seed: int, quick: bool) -> dict[str, Any]:
    """Return a row: the training loss (a mean for each tenth of the steps), and the test result."""
    torch.manual_seed(seed)
    make, steps, optimizer_of = TASKS[task]
    steps = 20 if quick else steps
    model, batch, (x, y) = make(seed)
    optimizer = hvd.DistributedOptimizer(
        optimizer_of(model.parameters()), model.named_parameters(), compression=METHODS[method]
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    mean = hvd.allreduce(torch.stack(losses)).reshape(-1, steps // 20).mean(1)
    model.eval()
    with torch.no_grad():
        logits = model(x)
    tested = nn.functional.cross_entropy(logits, y).item()
    accuracy = (logits.argmax(1) == y).float().mean().item()
    curve = [round(value, 4) for value in mean.tolist()]
    return {
        "task": task, "method": method, "seed": seed, "steps": steps, "curve": curve,
        "test_loss": round(tested, 4), "test_accuracy": round(accuracy, 4),
    }  # fmt: skip


def show(file: Path) -> None:
    """Print the table, and write the plot beside `file`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = json.loads(file.read_text())["rows"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = plt.subplots(1, len(tasks), figsize=(5 * len(tasks), 4), squeeze=False)
    print("| task | compression | test loss | accuracy |\n|---|---|---|---|")
    for axis, task in zip(axes[0], tasks, strict=True):
        for number, method in enumerate(METHODS):
            of_both = [row for row in rows if (row["task"], row["method"]) == (task, method)]
            if not of_both:
                continue
            cells = []
            for key, digits_shown in (("test_loss", 3), ("test_accuracy", 3)):
                values = [row[key] for row in of_both]
                low, middle, high = min(values), statistics.median(values), max(values)
                cells.append(f"{middle:.{digits_shown}f} ({low:.3f} to {high:.3f})")
            print(f"| {task} | {method} | {cells[0]} | {cells[1]} |")
            curves = list(zip(*(row["curve"] for row in of_both), strict=True))
            every = of_both[0]["steps"] / len(curves)
            x = [every * (i + 1) for i in range(len(curves))]
            axis.plot(x, [statistics.median(c) for c in curves], color=f"C{number}", label=method)
            axis.fill_between(x, [min(c) for c in curves], [max(c) for c in curves],
                              color=f"C{number}", alpha=0.12)  # fmt: skip
        axis.set(title=task, xlabel="step", ylabel="training loss, mean of all ranks", yscale="log")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file.with_suffix(".png"), dpi=90)


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--show", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    if options.show:
        return show(options.show)
    torch.set_num_threads(1)
    hvd.init()
    rows = []
    for seed in options.seeds[: 1 if options.quick else None]:
        for task in TASKS:
            for method in METHODS:
                rows.append(train(task, method, seed, options.quick))
                if hvd.rank() == 0:
                    print(json.dumps({k: v for k, v in rows[-1].items() if k != "curve"}))
    if hvd.rank() == 0 and options.json:
        lines = ",\n".join(json.dumps(row) for row in rows)
        head = json.dumps({**machine(), "ranks": hvd.size(), "rows": []}, indent=1)
        Path(options.json).write_text(head.replace("[]\n}", "[\n") + lines + "\n]}\n")


if __name__ == "__main__":
    main()
