"""Batch normalisation of several ranks for Keras on PyTorch.

The moments are merged, sent and differentiated as in hororing/tensorflow/sync_batch_norm.py.
"""

from __future__ import annotations

from typing import Any

import keras
import torch
from torch.autograd.function import once_differentiable

from hororing._adapters.batch_norm_groups import GroupedLayer
from hororing._requests.arguments import Sum
from hororing._requests.process_sets import ProcessSet, global_process_set
from hororing.torch import recomputation
from hororing.torch._tensor.batch_statistics import local_statistics, masked, merged
from hororing.torch._tensor.verbs import verbs

_untraced: Any = torch.compiler.disable  # torch declares no types


@keras.saving.register_keras_serializable(package="hororing")
class SyncBatchNormalization(GroupedLayer, keras.layers.BatchNormalization):  # type: ignore[misc]
    """Batch normalisation with the statistics of several ranks' batches.

    As hororing.tensorflow.SyncBatchNormalization, whose arguments it has and whose files it reads:
    docs/large_batch.md, docs/tensorflow.md. A checkpointed segment sends its requests again,
    on all ranks alike, unless `hororing.torch.recomputation.stored_statistics` is its context.
    """

    def __init__(
        self,
        *,
        process_set: ProcessSet = global_process_set,
        group_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.check_arguments(keras, process_set, kwargs)
        super().__init__(**kwargs)
        self.share(process_set, group_size)

    def _moments(
        self, inputs: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Keras calls this in training, with float32 or float64, and expects biased variances.
        result: tuple[torch.Tensor, torch.Tensor]
        if inputs.device.type == "meta":  # Keras is finding out shapes
            result = super()._moments(inputs, mask)
        else:
            result = self._moments_of_all(inputs, mask)
        return result

    @_untraced  # type: ignore[untyped-decorator]
    def _moments_of_all(
        self, inputs: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Alone, too: on torch Keras subtracts the mean's square from the mean of squares, which
        # loses all digits of a variance that is small beside it.
        group = self._sharing()
        if mask is not None:
            mask = mask.bool().unsqueeze(-1).broadcast_to(inputs.shape)
        mean, variance, count = _whole_batch(inputs, mask, self, group)
        if mask is not None:
            # Keras divides by count + epsilon where there is a mask, and so has no moments of
            # nothing, but zeros.
            share = count / (count + keras.backend.epsilon())
            mean, variance = share * mean, share * (variance + ((1 - share) * mean).square())
        return mean, variance

    def _gather(self, rows: torch.Tensor, group: ProcessSet | None) -> recomputation.Statistics:
        """Make count, mean and M2 of this rank's batch those of all batches, per channel."""
        if group is None or len(group.ranks) == 1:
            count, mean, m2 = rows
            return count, mean, m2
        statistics = recomputation.stored(self.path)
        if statistics is None:
            all_rows = verbs.allgather(
                rows[None].cpu(), name=f"{self.path}.forward", process_set=group
            ).to(rows.device)
            statistics = merged(*all_rows.unbind(1))
            recomputation.store(self.path, statistics)
        return statistics

    def _check_count(self, count: torch.Tensor) -> None:
        if int(count[0]) == 0:
            raise ValueError(self._empty())


class _WholeBatch(torch.autograd.Function):
    """Mean, biased variance and count per channel of all batches; differentiable once."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        layer: SyncBatchNormalization,
        group: ProcessSet | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        axes = list(layer._reduction_axes)
        count, mean, m2 = local_statistics(values, axes, mask)
        rows = torch.stack([torch.zeros_like(mean) + count, mean, m2])
        count, mean, m2 = layer._gather(rows, group)
        if mask is None:
            layer._check_count(count)
        divisor = count.clamp(min=1)
        variance = (m2 / divisor).to(values.dtype)
        mean, divisor = mean.to(values.dtype), divisor.to(values.dtype)
        ctx.save_for_backward(values, mask, mean, divisor)
        ctx.layer, ctx.group = layer, group
        ctx.per_channel = [1 if at in axes else n for at, n in enumerate(values.shape)]
        count = count.to(values.dtype)
        ctx.mark_non_differentiable(count)
        return mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, mean_gradient: Any, variance_gradient: Any, _: Any) -> Any:
        values, mask, mean, divisor = ctx.saved_tensors
        total = torch.stack([mean_gradient, variance_gradient])
        if ctx.group is not None and len(ctx.group.ranks) > 1:
            name = f"{ctx.layer.path}.backward"
            total = verbs.allreduce(total.cpu(), name=name, op=Sum, process_set=ctx.group)
            total = total.to(values.device)
        constant, slope = (row.view(ctx.per_channel) for row in total / divisor)
        gradient = constant + 2 * slope * (values - mean.view(ctx.per_channel))
        return masked(gradient, mask), None, None, None


_whole_batch: Any = _WholeBatch.apply
