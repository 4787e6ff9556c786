"""Sharding samplers, exact evaluation and loaders of hororing.toolkit.torch.data."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import mpirun
import numpy as np
import pytest
import session
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hororing.torch as hvd
from hororing.toolkit.data import normalize
from hororing.toolkit.data.evaluation import masked_arrays
from hororing.toolkit.data.sharding import permutation
from hororing.toolkit.torch.data import Normalize, ShardSampler, correct, evaluate, masked_loader

N = 1797
METRICS = {"correct": correct, "loss": partial(functional.cross_entropy, reduction="none")}


def task() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(mpirun.seed())
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
    model[1].running_mean.normal_()
    return model, torch.randn(N, 8), torch.randint(6, (N,))


def alone(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[int, float]:
    model.eval()
    with torch.no_grad():
        outputs = model(x)
    model.train()
    loss = functional.cross_entropy(outputs.double(), y, reduction="sum")
    return int((outputs.argmax(1) == y).sum()), float(loss)


def case_evaluation_equals_one_process() -> None:
    hvd.init()
    model, x, y = task()
    model[0].eval()
    hits, loss = alone(model, x, y)
    for batch in (100, 19):
        for batches in (masked_loader(TensorDataset(x, y), batch), masked_arrays((x, y), batch)):
            results = evaluate(model, batches, METRICS)
            assert (results["correct"].total, results["correct"].count) == (hits, N)
            assert abs(results["loss"].total - loss) <= 1e-5 * loss
    assert [each.training for each in model] == [True] * 3


def case_the_sampler_of_torch_counts_twice() -> None:
    model, x, y = task()
    hits, _ = alone(model, x, y)
    sampler: Any = DistributedSampler(TensorDataset(x, y), hvd.size(), hvd.rank(), shuffle=False)
    loader = DataLoader(TensorDataset(x, y), 32, sampler=sampler)
    results = evaluate(model, loader, METRICS)
    exact = N % hvd.size() == 0
    assert (results["correct"].count == N) == exact
    results = evaluate(model, loader if hvd.rank() == 0 else [], {"correct": correct})
    assert results["correct"].count == sampler.num_samples  # ranks may have no batches at all
    assert hits > 0


def case_metrics_of_a_batch_are_refused() -> None:
    model, x, y = task()
    with pytest.raises(ValueError, match="metric 'loss' is one number for a batch"):
        evaluate(model, [(x, y)], {"loss": functional.cross_entropy})
    with pytest.raises(ValueError, match="need a mask of bool"):
        evaluate(model, [(x, y, torch.ones(N))], {"correct": correct})


def case_a_metric_that_fails_on_one_rank_fails_on_all() -> None:
    def metric(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if hvd.rank() == 0:
            raise ZeroDivisionError("of rank 0")
        return correct(outputs, targets)

    model, x, y = task()
    expected = ZeroDivisionError if hvd.rank() == 0 else RuntimeError
    with pytest.raises(expected, match="of rank 0"):
        evaluate(model, [(x, y)], {"correct": metric})
    assert evaluate(model, [(x, y)], {"correct": correct})["correct"].count == N * hvd.size()


def case_masked_values_may_be_anything() -> None:
    values = torch.tensor([[1.0, 2.0], [float("nan"), 3.0], [4.0, 5.0]])
    mask = torch.tensor([True, False, True])
    results = evaluate(nn.Identity(), [(values, values, mask)], {"sum": lambda outputs, _: outputs})
    assert (results["sum"].total, results["sum"].count) == (12 * hvd.size(), 4 * hvd.size())


def case_loaders_with_a_sampler() -> None:
    sampler = ShardSampler(range(100), seed=5)
    loader = DataLoader(torch.arange(100), batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen = torch.cat(list(loader)).tolist()
        order = permutation(100, seed=5, epoch=epoch)[: 100 // hvd.size() * hvd.size()]
        assert seen == order[hvd.rank() :: hvd.size()].tolist()
        assert len(loader) == -(-len(seen) // 4)
    sampler.set_epoch(2)
    for batch, _ in zip(range(3), loader, strict=False):
        sampler.record_batch(batch, 4)
    sampler.synchronize()
    resumed = ShardSampler(100)
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file))  # weights_only=True
    assert list(resumed) == list(sampler)
    assert len(sampler) == (100 - 12 * hvd.size()) // hvd.size()
    np.testing.assert_array_equal(np.bincount(list(sampler)).max(), 1)


def test_normalizing_equals_the_reference() -> None:
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    images = np.arange(2 * 256 * 3, dtype=np.uint64).reshape(2, 256, 3).astype(np.uint8)
    images[0] = np.arange(256)[:, None]  # every value in every channel
    x = images.astype(np.float64) / 255
    reference = ((x - mean) / std).astype(np.float16)
    host, device = normalize.Normalize(mean, std), Normalize(mean, std)
    results = [
        host(images),
        device(torch.from_numpy(images)).numpy(),
        device.by_arithmetic(torch.from_numpy(images)).numpy(),
    ]
    for y in results:
        assert (y.dtype, y.shape) == (np.float16, (2, 256, 4))
        assert not y[..., 3].any()
        apart = y[..., :3].view(np.int16).astype(int) - reference.view(np.int16)
        assert abs(apart).max() <= 1
    assert host(images[:, ::2, :]).tolist() == results[0][:, ::2].tolist()
    assert normalize.Normalize([0.5], [0.5], channels=1)(np.zeros((3, 1), np.uint8)).shape == (3, 1)
    for bad in (images.astype(np.float32), images[..., :2]):
        with pytest.raises(ValueError, match=r"takes uint8 images of shape \(..., 3\), not"):
            host(bad)
        with pytest.raises(ValueError, match="takes uint8 images"):
            device(torch.from_numpy(bad))
    for mean, std, channels in (([0.5], [0.5, 1], 4), ([0.5], [0.0], 4), ([0.5] * 3, [1.0] * 3, 2)):
        with pytest.raises(ValueError, match="Normalize: mean="):
            normalize.Normalize(mean, std, channels)


test_case = session.on_ranks(globals(), 2, push=[2], session="torch")
