"""Stochastic rounding: of weights, identical on all ranks; of activations, on each its own.

`hororing.large_batch.stochastic_rounding` says what it is. On the CPU the core's kernels do it; on
other devices the same generator is written in torch's operations, with the same results.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from hororing.large_batch import stochastic_rounding as core
from hororing.process_sets import ProcessSet, global_process_set

_NAMES: Final = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_WORD: Final = 0xFFFFFFFF
_ROTATIONS: Final = ((10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20))


class StochasticRounding:
    """How 16-bit parameters are updated without float32 master weights: see `LARS(rounding=...)`.

    Parameters
    ----------
    seed : from 0 to 2**64 - 1; rank 0's counts. None: a random one. All ranks of the set must make
        this object, after `init()`.
    process_set : the ranks that hold the same weights.
    """

    def __init__(
        self, seed: int | None = None, *, process_set: ProcessSet = global_process_set
    ) -> None:
        self.seed = core.shared_seed(seed, process_set=process_set)

    def __repr__(self) -> str:
        return f"StochasticRounding(seed={self.seed})"


def round_into(
    result: torch.Tensor,
    source: torch.Tensor,
    *,
    seed: int,
    tensor: int = 0,
    step: int = 0,
    stream: int = core.IDENTICAL_STREAM,
) -> None:
    """Round `source` at random into `result`, unseen by autograd.

    Parameters
    ----------
    result : float16 or bfloat16; any strides.
    source : float32, of the same shape and device.
    seed, tensor, step, stream : as of `round_stochastically` of hororing.large_batch.
    """
    name = _NAMES.get(result.dtype)
    if name is None:
        raise TypeError(f"stochastic rounding is to float16 or bfloat16, not to {result.dtype}")
    if source.dtype != torch.float32 or source.shape != result.shape:
        raise TypeError(
            f"stochastic rounding takes float32 of shape {list(result.shape)}, not {source.dtype} "
            f"of shape {list(source.shape)}"
        )
    with torch.no_grad():
        source = source.detach().contiguous()
        if source.device.type != "cpu":
            result.copy_(rounded_by_torch(source, result.dtype, seed, tensor, step, stream))
            return
        target = result if result.is_contiguous() else torch.empty_like(source, dtype=result.dtype)
        core.round_memory(
            name, target.data_ptr(), source.data_ptr(), source.numel(),
            seed=seed, tensor=tensor, step=step, stream=stream,
        )  # fmt: skip
        if target is not result:
            result.copy_(target)
        else:
            torch.autograd.graph.increment_version(result)


def rounded_by_torch(
    source: torch.Tensor, dtype: torch.dtype, seed: int, tensor: int, step: int, stream: int
) -> torch.Tensor:
    """Do what the core does, in integer operations of torch; for devices that it cannot reach."""
    random = _random_numbers(source.numel(), source.device, seed, tensor, step, stream)
    bits = source.view(torch.int32).flatten().to(torch.int64) & _WORD
    size, sign = bits & 0x7FFFFFFF, (bits >> 16) & 0x8000
    if dtype == torch.bfloat16:
        number = torch.where(size > 0x7F800000, (bits >> 16) | 0x0040, (bits + random) >> 16)
    else:
        normal = (size - 0x38000000 + (random >> 3)) >> 13
        # In units of 2^-40. In float64, since devices may flush subnormal float32.
        units = (source.flatten().abs().double() * 2.0**40).clamp(max=2.0**27)
        subnormal = (units.nan_to_num(0.0).to(torch.int64) + random) >> 16
        number = torch.where(size < 0x38800000, subnormal, normal)
        number = torch.where(size < 0x47800000, number, 0x7C00)
        number = torch.where(size > 0x7F800000, 0x7E00 | ((size >> 13) & 0x03FF), number) | sign
    signed = torch.where(number >= 0x8000, number - 0x10000, number).to(torch.int16)
    return signed.view(dtype).reshape(source.shape)


def _random_numbers(
    count: int, device: torch.device, seed: int, tensor: int, step: int, stream: int
) -> torch.Tensor:
    """Return 16 bits for each of `count` elements, as int64; csrc/base/stochastic_rounding.h."""
    key = [seed & _WORD, seed >> 32, tensor, stream]
    key.append(0x1BD11BDA ^ key[0] ^ key[1] ^ key[2] ^ key[3])
    tiles = -(-count // 128)
    block = torch.arange(16 * tiles, device=device)
    zero = torch.zeros_like(block)
    words = [block & _WORD, block >> 32, zero + (step & _WORD), zero + (step >> 32)]
    for turn in range(6):
        words = [(word + key[(turn + at) % 5]) & _WORD for at, word in enumerate(words)]
        words[3] = (words[3] + turn) & _WORD
        if turn == 5:
            break
        for round_ in range(4 * turn, 4 * turn + 4):
            odd = round_ % 2
            for first, second, left in zip(
                (0, 2), (3, 1) if odd else (1, 3), _ROTATIONS[round_ % 8], strict=True
            ):
                words[first] = (words[first] + words[second]) & _WORD
                turned = (words[second] << left) | (words[second] >> (32 - left))
                words[second] = (turned & _WORD) ^ words[first]
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack([half.reshape(tiles, 16) for half in halves], dim=1).flatten()[:count]


class _Cast(torch.autograd.Function):
    """Rounds at random; the gradient passes, since the mean of the roundings is the input."""

    @staticmethod
    def forward(
        ctx: Any, source: torch.Tensor, dtype: torch.dtype, seed: int, tensor: int, step: int
    ) -> torch.Tensor:
        result = torch.empty_like(source, dtype=dtype)
        round_into(result, source, seed=seed, tensor=tensor, step=step, stream=core.rank_stream())
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return grads[0].float(), None, None, None, None


class StochasticCast(nn.Module):
    """Rounds float32 activations at random to 16 bits, on every rank with its own random numbers.

    In evaluation it rounds to nearest. How often it has been called in training is saved with the
    module, so that a resumed run goes on as it would have.

    Parameters
    ----------
    dtype : torch.bfloat16 or torch.float16.
    seed : of the run; layers with equal seeds need different `tensor` numbers.
    tensor : a number of the layer's own.
    """

    calls: torch.Tensor

    def __init__(self, dtype: torch.dtype = torch.bfloat16, *, seed: int, tensor: int = 0) -> None:
        super().__init__()
        if dtype not in _NAMES:
            raise TypeError(f"StochasticCast: dtype is float16 or bfloat16, not {dtype}")
        self.dtype, self.seed, self.tensor = dtype, core.checked_seed(seed), tensor
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
