"""The examples in docstrings run on one rank, with the names that a script has at that place.

Push tier: 2 s in a session of torch. The full tier has those of Keras and TensorFlow: 10 s.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mpirun
import numpy as np
import pytest
import session
import tiers

ROOT = Path(__file__).parents[3]
# Modules whose examples need several ranks, and the tests that run them.
ELSEWHERE = {
    "hororing.ray.train": "test_ray.py",
    "hororing.ray.tuning": "test_ray_tune.py",
    "hororing.hororun.function": "test_run.py",
    "hororing.testing.function": "test_ranks_mark.py",
    "hororing.toolkit.stragglers.watch": "test_stragglers.py",
}

# Public names without an example. They report facts about this machine, are results or base classes
# of others, are in the example of another name, or need several ranks, an elastic job, another
# program or TensorFlow 1.
WITHOUT = """
    Auto BF16Compressor BroadcastGlobalVariablesHook Collection Collective CommitStateCallback
    Comparison Compressor Diagnosis FP16Compressor HierarchicalSGDCallback Int8 MLflow Metric
    ModelStateHandler Network NoneCompressor ObjectWithStateHandler OptimizerStateHandler Outcome
    PowerSGD Prediction Preset Profile Range RankReport Recording Run SamplerStateHandler
    SearchResult State StateHandler StochasticRounding TensorBoard TopK Tracker Trial
    UpdateBatchStateCallback UpdateEpochStateCallback WeightsAndBiases broadcast_global_variables
    ccl_built check_num_rank_power_of_2 cross_rank cross_size cuda_built ddl_built diagnose
    evaluate_checkpoints export get_handler_registry gloo_built gloo_enabled
    handle_average_backwards_compatibility history is_homogeneous load local_rank_op local_size
    local_size_op mpi_built mpi_enabled mpi_threads_supported nccl_built page predict
    process_set_included_op read_profile read_run read_timeline refs_to_vars rocm_built run run_fn
    set_handler_registry shutdown stop_timeline vars_to_refs
"""


def without_example(*, of_keras: bool) -> set[str]:
    """Return the functions and classes of docs/api whose docstrings have no example."""
    pages = "".join(page.read_text("utf-8") for page in ROOT.glob("docs/api/*.md"))
    found = set()
    for name in re.findall(r"^::: (\S+)", pages, re.MULTILINE):
        if bool({"keras", "tensorflow"} & set(name.split("."))) != of_keras or name.endswith(
            ".run"
        ):
            continue
        module = importlib.import_module(name)
        mine = {
            key for key, each in vars(module).items() if getattr(each, "__module__", "") == name
        }
        for public in getattr(module, "__all__", mine):
            each = getattr(module, public)
            if not callable(each) or (isinstance(each, type) and issubclass(each, BaseException)):
                continue
            if not public.startswith("_") and ">>> " not in (each.__doc__ or ""):
                found.add(public)
    return found


def modules(*, of_keras: bool) -> list[str]:
    """Return the modules with examples, for PyTorch or for Keras and TensorFlow."""
    found = []
    for path in sorted(ROOT.glob("hororing/**/*.py")):
        if ">>> " in path.read_text("utf-8") and path.parent.name != "jax":  # tests/python/jax
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            keras = bool({"keras", "tensorflow"} & set(name.split("."))) or name.endswith(
                "elastic_callbacks"
            )
            if keras == of_keras and name not in ELSEWHERE:
                found.append(name)
    return found


class Checker(doctest.OutputChecker):
    """An example that shows no output may have some."""

    def check_output(self, want: str, got: str, flags: int) -> bool:
        return not want or super().check_output(want, got, flags)


def run(names: list[str], script: Callable[[str], dict[str, Any]]) -> int:
    """Run the examples of the modules, each docstring in its own script; return their number."""
    runner = doctest.DocTestRunner(Checker(), optionflags=doctest.NORMALIZE_WHITESPACE)
    said = io.StringIO()
    for name in names:
        module = importlib.import_module(name)
        for each in doctest.DocTestFinder(exclude_empty=True).find(module):
            if each.examples:
                with folder():
                    each.globs = {**vars(module), **script(name)}
                    runner.run(each, out=said.write, clear_globs=False)
    assert runner.failures == 0, said.getvalue()
    return runner.tries


@contextlib.contextmanager
def folder() -> Iterator[None]:
    """Run examples in a temporary folder, into which they write."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as path:
        os.chdir(path)
        try:
            yield
        finally:
            os.chdir(before)


def torch_script(_: str) -> dict[str, Any]:
    """Return the names that a PyTorch script has defined before the example."""
    import argparse

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import hororing.torch as hvd
    from hororing.toolkit.large_batch.schedules import WarmupPolynomial
    from hororing.toolkit.torch.optim import parameter_groups

    model = torch.nn.Linear(3, 2)
    dataset = TensorDataset(torch.randn(16, 3), torch.randn(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 3)).sum().backward()
    return {
        "DataLoader": DataLoader, "WarmupPolynomial": WarmupPolynomial,
        "args": argparse.Namespace(seed=1, epochs=2), "batch_size": 4, "correct": torch.tensor(3),
        "dataset": dataset, "epoch": 0, "hvd": hvd, "loader": DataLoader(dataset, 4),
        "model": model, "np": np, "optimizer": optimizer, "loss": torch.tensor(0.5),
        "scores": torch.ones(4, 2), "weights": torch.ones(3), "parameter_groups": parameter_groups,
        "sampler": hvd.elastic.ElasticSampler(dataset),
        "state": hvd.elastic.TorchState(model, optimizer, epoch=0), "torch": torch,
        "train": lambda *_: None, "train_and_test": lambda epoch: (1.0 / (epoch + 1), 0.5),
    }  # fmt: skip


def case_torch() -> None:
    import hororing.torch as hvd

    hvd.init(process_sets="dynamic")
    assert run(modules(of_keras=False), torch_script) > 150
    assert without_example(of_keras=False) <= {*WITHOUT.split()}


test_on_one_rank = session.on_ranks(globals(), 1, push=[1], session="torch")


def keras_script(module: str) -> dict[str, Any]:
    """Return those of a Keras or TensorFlow script."""
    import keras
    import tensorflow as tf

    import hororing.keras
    import hororing.tensorflow
    from hororing.toolkit.keras.optim import LARS, HierarchicalSGDCallback
    from hororing.toolkit.large_batch import schedules

    hvd = hororing.tensorflow if "tensorflow" in module else hororing.keras
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, loss="mse")
    x, y = np.ones((8, 3), np.float32), np.ones((8, 2), np.float32)
    return {
        "HierarchicalSGDCallback": HierarchicalSGDCallback, "LARS": LARS, "batch": 64,
        "bias": tf.Variable([1.0]), "config": {"lr": 0.1}, "hvd": hvd,
        "images": x, "keras": keras, "labels": y, "loss_of": keras.losses.MeanSquaredError(),
        "model": model, "optimizer": optimizer, "pair": hvd.global_process_set,
        "schedules": schedules, "state": hororing.keras.elastic.KerasState(model, epoch=0, batch=0),
        "tf": tf, "weights": tf.Variable([[1.0]]), "x": x, "y": y,
    }  # fmt: skip


@tiers.full
def test_of_keras_and_tensorflow() -> None:
    pytest.importorskip("tensorflow")
    job = mpirun.run(__file__, 1, environment={"KERAS_BACKEND": "tensorflow"})
    assert job.returncode == 0, job.report()


def main() -> None:
    import hororing.keras as hvd

    hvd.init()
    assert run(modules(of_keras=True), keras_script) > 70
    assert without_example(of_keras=True) <= {*WITHOUT.split()}


if __name__ == "__main__":
    main()
