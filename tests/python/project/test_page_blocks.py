"""The Python blocks of the pages run as the next lines of a script, on two or four ranks.

Full tier: 20 s for PyTorch, 40 s for Keras and TensorFlow. PyTorch's recipes: test_recipes.py.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Any

import mpirun
import numpy as np
import pytest
import tiers

import hororing.numpy

ROOT = Path(__file__).parents[3]

# Blocks that do not run here, by their page, or by words in them.
NOT_HERE = {
    "tutorial.md": "test_tutorial.py runs it",
    "show(step, loss": "it is one line of a loop",
    "search(space, train": "its ranks are those of one trial; test_search.py",
    "migrating.md": "it changes what `import horovod` means; test_as_horovod.py",
    "jax.md": "tests/python/jax/test_jax_programs.py",
    "RayExecutor(": "test_ray.py, where Ray is installed",
    "TorchTrainer(": "test_ray.py, where Ray is installed",
    "hororing.spark": "test_spark.py, where Spark is installed",
    "node1": "it needs other hosts; test_run.py runs the rest",
    "node3": "it needs other hosts",
    "WeightsAndBiases": "it needs accounts",
    ", ...)": "it leaves arguments out",
    "(...)": "it leaves arguments out",
    "(..., ": "it leaves arguments out",
    "scaler = hororing": "it shows two frameworks at once",
    "# Keras\n": "it shows two frameworks at once",
    "AverageMovingStatistics(": "it shows two frameworks at once",
    "shard_indices": "it shows a part of a pipeline",
}


def blocks(framework: str) -> list[tuple[str, str]]:
    """Return the place and the code of each block for a framework."""
    found = []
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]:
        text = page.read_text("utf-8")
        if page.name == "pytorch.md":  # test_recipes.py runs the recipes
            before, recipes, after = re.split(r"^## (?:Recipes|Collectives)$", text, flags=re.M)
            text = before + "\n" * (recipes.count("\n")) + after
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.S | re.M):
            code = match[1]
            if any(each == page.name or each in code for each in NOT_HERE):
                continue
            keras = page.stem in ("keras", "tensorflow") or re.search(r"\b(keras|tf)\.|Keras", code)
            ours = "keras" if keras else "numpy" if page.stem == "process_sets" else "torch"
            if framework == ours:
                line = text.count("\n", 0, match.start()) + 2
                found.append((f"{page.name}:{line}", textwrap.dedent(code)))
    return found


@tiers.full
@pytest.mark.parametrize(("framework", "size"), [("torch", 2), ("keras", 2), ("numpy", 4)])
def test_blocks_run(framework: str, size: int, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow" if framework == "keras" else framework)
    environment = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    job = mpirun.run(
        __file__, size, framework, str(tmp_path), timeout_s=200, environment=environment
    )  # fmt: skip
    assert job.returncode == 0, job.report()
    assert len(blocks(framework)) > (0 if framework == "numpy" else 10)


def test_what_does_not_run_is_there() -> None:
    pages = {page.name: page.read_text("utf-8") for page in ROOT.glob("docs/*.md")}
    code = "".join(pages.values())
    assert [each for each in NOT_HERE if each not in pages and each not in code] == []


# ---------------------------------------------------------------------------------------------
# On the ranks


def torch_script() -> dict[str, Any]:
    """Return the names that scripts have defined before these blocks, with those of docstrings."""
    import glob
    import itertools
    from collections import OrderedDict

    import test_doctests
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint
    from torch.utils.data import DataLoader, TensorDataset

    import hororing.torch as hvd
    from hororing.toolkit.torch.data import ShardSampler
    from hororing.toolkit.torch.optim import with_float32_update

    # layer1.0.bn3, as in a ResNet
    block = nn.Sequential(OrderedDict(linear=nn.Linear(3, 2), bn3=nn.BatchNorm1d(2)))
    model = nn.Sequential(OrderedDict(layer1=nn.Sequential(block)))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(16, 3), torch.arange(16) % 2)
    loader = DataLoader(data, 4)
    loss_of = nn.functional.cross_entropy
    names = test_doctests.torch_script("")

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> float:
        optimizer.zero_grad()
        loss = loss_of(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return hvd.allreduce(loss.detach(), name="loss").item()

    def train(*what: Any) -> float:
        batch = what[0] if what and isinstance(what[0], list) else next(iter(loader))
        return step(model, names["optimizer"], batch)

    def build(**params: Any) -> Any:
        if params:
            return model
        distributed = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        return model, distributed, data

    names |= {
        "ShardSampler": ShardSampler, "base_lr": 0.1, "batches": list(loader), "block": block,
        "build": build, "checkpoint": checkpoint, "config": {"lr": 0.1},
        "device": torch.device("cpu"), "epochs": 2, "glob": glob.glob, "itertools": itertools,
        "loader": loader, "loss_fn": loss_of, "model": model, "optimizer": optimizer, "os": os,
        "state": hvd.elastic.TorchState(model, optimizer, epoch=0), "step": step,
        "test_set": data, "train": train, "train_set": data,
        "train_and_test": lambda epoch: (1.0 / (epoch + 1), 0.5, 16),
        "with_float32_update": with_float32_update, "x": torch.randn(4, 3),
    }  # fmt: skip
    names["args"].lr = 0.1
    return names


def keras_script(page: str) -> dict[str, Any]:
    """Return those of Keras and TensorFlow scripts."""
    import keras
    import tensorflow as tf
    import test_doctests

    from hororing.toolkit.large_batch.schedules import WarmupPolynomial
    from hororing.toolkit.tracking import RunRecord

    keras.mixed_precision.set_global_policy("float32")
    names = test_doctests.keras_script(page)
    names["model"].save("last.keras")
    data = tf.data.Dataset.from_tensor_slices((np.ones((64, 3)), np.ones((64, 2))))
    return names | {
        "RunRecord": RunRecord, "data": data.batch(8) if page == "elastic" else data,
        "schedule": WarmupPolynomial(1.0, total_steps=100, warmup_steps=10),
        "train": lambda *_: None, "x_test": np.ones((12, 3)), "y_test": np.arange(12) % 2,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=["torch", "keras", "numpy"])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.framework != "numpy":  # NumPy's block is the begin of a script
        hororing.numpy.init()
    failed = []
    for number, (place, code) in enumerate(blocks(args.framework)):
        rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
        folder = args.folder / f"{number}.{rank}"
        folder.mkdir()
        os.chdir(folder)
        page = place.split(".")[0]
        script: dict[str, Any] = {}
        if args.framework != "numpy":
            script = torch_script() if args.framework == "torch" else keras_script(page)
        file = Path(f"{page}.py").absolute()  # TensorFlow reads the source of tf.functions
        file.write_text(code)
        try:
            exec(compile(code, str(file), "exec"), script)
        except Exception:
            failed.append(place)
            traceback.print_exc()
    sys.exit("\n".join(failed) or None)


if __name__ == "__main__":
    main()
