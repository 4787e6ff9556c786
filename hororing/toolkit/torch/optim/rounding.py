"""Stochastic rounding: of weights, identical on all ranks; of activations, on each its own.

`hororing.toolkit.large_batch.stochastic_rounding` says what it is, and defines the random numbers.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from hororing.toolkit.large_batch import stochastic_rounding as shared
from hororing.toolkit.large_batch.stochastic_rounding import StochasticRounding

# So many elements are rounded at once: more would fall out of a core's cache, and need memory.
_PIECES: Final = {"cpu": 2**18}

__all__ = ["StochasticCast", "StochasticRounding", "round_into"]


def round_into(
    result: torch.Tensor,
    source: torch.Tensor,
    *,
    seed: int,
    tensor: int = 0,
    step: int = 0,
    stream: int = shared.IDENTICAL_STREAM,
) -> None:
    """Round `source` at random into `result`, unseen by autograd.

    Parameters
    ----------
    result : torch.Tensor
        Float16 or bfloat16; any strides.
    source : torch.Tensor
        Float32, of the same shape and device.
    seed : int
        Of the run, from 0 to 2**64 - 1; see `shared_seed` of hororing.toolkit.large_batch.
    tensor, step : tensor or int, optional
        Numbers of the tensor and of the step, each with its own random numbers.
    stream : int, optional
        0 if all ranks need the same result, `rank_stream()` if each has its own.

    Examples
    --------
    >>> result = torch.empty(3, dtype=torch.bfloat16)
    >>> round_into(result, torch.full((3,), 1.001), seed=1)  # 1 or 1.0078
    """
    _check_type(result.dtype)
    if source.dtype != torch.float32 or source.shape != result.shape:
        raise TypeError(
            f"stochastic rounding takes float32 of shape {list(result.shape)}, not {source.dtype} "
            f"of shape {list(source.shape)}"
        )
    keys = shared.keys(shared.checked_seed(seed), tensor, stream)
    words = [_signed(key + step * each) for key, each in zip(keys, shared.STEPS, strict=True)]
    piece = _PIECES.get(source.device.type, 2**24)
    with torch.no_grad():
        flat = source.detach().reshape(-1)
        rounded = torch.empty_like(flat, dtype=torch.int16)
        for begin in range(0, flat.numel(), piece):
            part = flat[begin : begin + piece]
            bits = part.view(torch.int32)
            random = _random_numbers(begin, part.numel(), part.device, words)
            if result.dtype == torch.bfloat16:
                number = torch.where(part.isnan(), bits | 0x400000, bits + random) >> 16
            else:
                number = _float16_bits(part, bits, random)
            rounded[begin : begin + piece] = number
        result.copy_(rounded.view(result.dtype).view(result.shape))


def _random_numbers(begin: int, count: int, device: torch.device, words: list[int]) -> torch.Tensor:
    """Return 16 bits for each of `count` elements from `begin` on, which is even."""
    end = begin + count
    # Sums and products of int32 wrap around; >> keeps the sign.
    x = torch.arange(begin // 2, (end + 1) // 2, dtype=torch.int32, device=device).add_(words[0])
    x ^= (x >> 16) & 0xFFFF
    x.mul_(_signed(shared.MULTIPLIERS[0])).add_(words[1])
    x ^= (x >> 15) & 0x1FFFF
    x.mul_(_signed(shared.MULTIPLIERS[1]))
    x ^= (x >> 16) & 0xFFFF
    return x.view(torch.int16)[:count].to(torch.int32).bitwise_and_(0xFFFF)


def _float16_bits(source: torch.Tensor, bits: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    size = bits & 0x7FFFFFFF
    small = size < 0x38800000  # 2**-14: below are float16's subnormal numbers
    units = (torch.where(small, size, 0).view(torch.float32) * 2.0**40).to(torch.int32)
    # 13 bits fall away, and a carry raises the exponent, up to infinity's.
    normal = ((size - 0x38000000 + (random >> 3)) >> 13).clamp_(max=0x7C00)
    number = torch.where(small, (units + random) >> 16, normal)
    return torch.where(source.isnan(), 0x7E00, number) | ((bits >> 16) & -0x8000)


def _signed(word: int) -> int:
    """Return the number from -2**31 to 2**31 - 1 that is `word` modulo 2**32."""
    return (word + 2**31) % 2**32 - 2**31


def _check_type(dtype: torch.dtype) -> None:
    if dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"stochastic rounding rounds to float16 or bfloat16, not to {dtype}")


class _Cast(torch.autograd.Function):
    """Rounds at random; the gradient passes, since the mean of the roundings is the input."""

    @staticmethod
    def forward(
        ctx: Any, source: torch.Tensor, dtype: torch.dtype, seed: int, tensor: int, step: int
    ) -> torch.Tensor:
        result = torch.empty_like(source, dtype=dtype)
        stream = shared.rank_stream()
        round_into(result, source, seed=seed, tensor=tensor, step=step, stream=stream)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return grads[0].float(), None, None, None, None


class StochasticCast(nn.Module):
    """Rounds float32 activations at random to 16 bits, on every rank with its own random numbers.

    In evaluation it rounds to nearest. The number of calls in training is saved with the module, so
    that a resumed run continues as it would have without the interruption.

    Parameters
    ----------
    dtype : torch.dtype, optional
        torch.bfloat16 or torch.float16.
    seed : int
        Of the run; layers with equal seeds need different `tensor` numbers.
    tensor : tensor, optional
        A number that is unique to the layer.

    Examples
    --------
    >>> layers = torch.nn.Sequential(torch.nn.Linear(3, 2), StochasticCast(seed=1))
    >>> layers(torch.ones(4, 3)).dtype
    torch.bfloat16
    """

    calls: torch.Tensor

    def __init__(self, dtype: torch.dtype = torch.bfloat16, *, seed: int, tensor: int = 0) -> None:
        super().__init__()
        _check_type(dtype)
        self.dtype, self.seed, self.tensor = dtype, shared.checked_seed(seed), tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return `inputs` (float32, any shape) as `dtype`."""
        if not self.training:
            return inputs.to(self.dtype)
        step = int(self.calls)
        self.calls += 1
        apply: Any = _Cast.apply
        result: torch.Tensor = apply(inputs, self.dtype, self.seed, self.tensor, step)
        return result

    def extra_repr(self) -> str:
        """Describe the arguments."""
        return f"{self.dtype}, seed={self.seed}, tensor={self.tensor}"
