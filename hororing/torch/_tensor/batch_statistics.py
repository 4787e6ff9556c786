"""Count, mean and sum of squared deviations (M2) per channel, of one batch and of several.

    count = sum n_r,  mean = sum n_r mean_r / count,  M2 = sum (M2_r + n_r (mean_r - mean)^2)

(Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample variances,
1979.) Unlike sum and sum of squares, which one allreduce could add up, this never subtracts large
numbers, whatever the mean, and unequal or empty batches need no special case. Means and M2 are
float64, so that merging is exact enough.
"""

from __future__ import annotations

import torch


def local_statistics(
    values: torch.Tensor, axes: list[int], mask: torch.Tensor | None = None
) -> tuple[int | torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count, mean and M2 of one batch. All are 0 for an empty one.

    `axes` are all but that of channels. With a `mask` of the shape of `values`, elements where it
    is false do not count, and counts are float64 per channel.
    """
    sums = masked(values, mask).sum(axes, keepdim=True)
    count: int | torch.Tensor
    divisor: int | torch.Tensor
    if mask is None:
        count = values.numel() // max(sums.numel(), 1)
        divisor = max(count, 1)
        mean = sums / divisor
    else:
        count = mask.sum(axes, keepdim=True).double()
        divisor = count.clamp(min=1)
        mean = sums / divisor.to(values.dtype)
        count = count.flatten()
    deviations = masked(values - mean, mask)
    # The mean was rounded. The sum of the deviations corrects both (the corrected two-pass
    # algorithm of the same authors).
    rest = deviations.sum(axes, keepdim=True).double()
    m2 = deviations.square_().sum(axes, keepdim=True).double() - rest.square() / divisor
    return count, (mean.double() + rest / divisor).flatten(), m2.clamp_(min=0).flatten()


def merged(
    counts: torch.Tensor, means: torch.Tensor, m2s: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count, mean and M2 of all batches, of which each is a row. `counts` may have one column."""
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count.clamp(min=1)
    return count, mean, (m2s + counts * (means - mean).square()).sum(0)


def masked(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return `values`, 0 where there is a mask and it is false."""
    return values if mask is None else values.where(mask, values.new_zeros([]))
