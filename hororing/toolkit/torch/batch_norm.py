"""Averages running statistics that differ between groups of ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hororing.extension import ProcessSet, global_process_set
from hororing.toolkit.large_batch.averaging import weighted_mean


def average_running_statistics(
    model: nn.Module,
    samples: float = 1.0,
    *,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Average the running means and variances of batch normalisation over ranks.

    All ranks call it, before evaluation and before a checkpoint is written. Training may continue
    with the averages. It sends one request for the whole model. Ranks have the same bits
    afterwards.

    Parameters
    ----------
    samples : float, optional
        The weight of this rank, if ranks have trained on different numbers of samples.

    Raises
    ------
    ValueError : for a negative weight, and on every rank when all are 0.
    MismatchError : when models differ.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    >>> average_running_statistics(model)
    """
    buffers = [
        buffer
        for module in model.modules()
        if isinstance(module, _BatchNorm)
        for buffer in (module.running_mean, module.running_var)
        if buffer is not None
    ]
    if not buffers:
        return
    means = weighted_mean(
        [buffer.detach().double().cpu().numpy() for buffer in buffers],
        samples,
        name="average_running_statistics",
        process_set=process_set,
    )
    with torch.no_grad():
        for buffer, mean in zip(buffers, means, strict=True):
            buffer.copy_(torch.from_numpy(mean))
