"""Exact evaluation of torch modules; hororing/toolkit/data/evaluation.py defines exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hororing.extension import ProcessSet, global_process_set
from hororing.toolkit.data.evaluation import Total, Totals, masked_batches

Metric = Callable[[Any, Any], torch.Tensor]


def correct(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return which samples have their largest output (dimension 1) at their target: booleans.

    >>> from hororing.toolkit.torch.data import correct
    >>> correct(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])).tolist()
    [True, False]
    """
    return outputs.argmax(1) == targets


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    metrics: Mapping[str, Metric],
    *,
    device: torch.device | str | None = None,
    process_set: ProcessSet = global_process_set,
) -> dict[str, Total]:
    """Evaluate `model` on each rank's batches, and return the totals over all ranks.

    Parameters
    ----------
    batches : iterable
        Of this rank: (inputs, targets), or (inputs, targets, mask), as from `masked_loader`;
        inputs are a tensor, or a tuple of the model's arguments. Ranks may have different
        numbers of batches, and none, unless layers of the model communicate in evaluation.
    metrics : dict of str to Metric
        By name, functions of (outputs, targets) that return a value for each sample, of shape
        (batch, ...), as ``functools.partial(functional.cross_entropy, reduction="none")`` does.
        Booleans and integers are counted exactly, others are added up in float64.
    device : torch.device or str, optional
        Where batches are put; by default where the model's first parameter is.

    Notes
    -----
    The model is in evaluation mode meanwhile, without gradients. Values are added up on their
    device; at the end two numbers per metric are read back.

    Raises
    ------
    ValueError : as `Totals.reduced` says; and for a metric that is one number for a batch.
    RuntimeError : on the other ranks, when a model, a metric or the batches of one have failed.

    Examples
    --------
    >>> error = lambda outputs, targets: (outputs - targets).square()
    >>> totals = evaluate(model, masked_loader(dataset, 8), {"error": error})
    >>> mean = totals["error"].mean
    """
    if device is None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
    totals = Totals(metrics)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with totals.adding(), torch.no_grad():
            sums = _sums(model, batches, metrics, torch.device(device))
            for (name, exact), (total, count) in sums.items():
                totals.add_sum(name, int(total) if exact else float(total), int(count))
    finally:
        for module, training in modes.items():
            module.training = training
    return totals.reduced(process_set)


def _sums(
    model: nn.Module,
    batches: Iterable[Any],
    metrics: Mapping[str, Metric],
    device: torch.device,
) -> dict[tuple[str, bool], tuple[torch.Tensor, torch.Tensor]]:
    sums: dict[tuple[str, bool], tuple[torch.Tensor, torch.Tensor]] = {}
    for batch in batches:
        inputs, targets, *rest = (_moved(each, device) for each in batch)
        outputs = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
        for name, metric in metrics.items():
            values = metric(outputs, targets)
            exact = not (values.is_floating_point() or values.is_complex())
            total, count = _masked_sum(name, values, rest[0] if rest else None, exact)
            before = sums.get((name, exact))
            sums[name, exact] = (
                (total, count) if before is None else (before[0] + total, before[1] + count)
            )
    return sums


def _masked_sum(
    name: str, values: torch.Tensor, mask: torch.Tensor | None, exact: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if values.dim() == 0:
        raise ValueError(
            f"metric '{name}' is one number for a batch; it must have one value per sample "
            '(reduction="none"), so that padding samples can be left out'
        )
    if mask is None:
        mask = torch.ones(len(values), dtype=torch.bool, device=values.device)
    if mask.dtype != torch.bool or mask.shape != values.shape[:1]:
        raise ValueError(
            f"metric '{name}': values of shape {tuple(values.shape)} need a mask of bool and of "
            f"shape {tuple(values.shape[:1])}, not {mask.dtype} {tuple(mask.shape)}"
        )
    values = values.to(torch.int64 if exact else torch.float64)
    counted = mask.view(-1, *[1] * (values.dim() - 1))
    total = values.where(counted, torch.zeros_like(values)).sum()  # NaN times 0 is NaN
    return total, mask.sum() * math.prod(values.shape[1:])


def _moved(item: Any, device: torch.device) -> Any:
    if isinstance(item, torch.Tensor):
        return item.to(device, non_blocking=True)
    if isinstance(item, (tuple, list)):
        return [_moved(each, device) for each in item]
    return torch.as_tensor(item, device=device)


class _Masked(Dataset[Any]):
    """Samples of a data set by (index, counts), with their masks."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, at: tuple[int, bool]) -> Any:
        index, counts = at
        return (*self.dataset[index], counts)


class _MaskedBatches:
    """A batch sampler of (index, counts)."""

    def __init__(self, samples: int, batch_size: int, rank: int | None, size: int | None) -> None:
        self.batches = list(masked_batches(samples, batch_size, rank, size))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[tuple[int, bool]]]:
        for indices, mask in self.batches:
            yield list(zip(indices.tolist(), mask.tolist(), strict=True))


def masked_loader(
    dataset: Any,
    batch_size: int,
    rank: int | None = None,
    size: int | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """Return a DataLoader of (inputs, targets, mask): this rank's shard for `evaluate`.

    All ranks have the same number of batches, and all batches the same size; padding samples have
    mask False.

    Parameters
    ----------
    dataset : Dataset
        With a length, whose items are tuples.
    rank, size : int, optional
        By default those of hororing.
    **options : dict
        Of DataLoader, as num_workers, pin_memory, collate_fn.

    Examples
    --------
    >>> inputs, targets, mask = next(iter(masked_loader(dataset, 10)))
    """
    batches: Any = _MaskedBatches(len(dataset), batch_size, rank, size)
    return DataLoader(_Masked(dataset), batch_sampler=batches, **options)
