"""Digests of torch's tensors, computed where they are: see hororing/_adapters/replica_check.py."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from hororing._adapters.replica_check import CHAIN, CHUNK, Digest, digest_at, factors

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_WORDS = {1: torch.int8, 2: torch.int16}


@torch.no_grad()
def digests(named: Iterable[tuple[str, torch.Tensor]]) -> list[Digest]:
    """Return the digests of those tensors that have all their elements here.

    Others are left out: sharded and sparse ones, and those of the meta device.
    """
    found: list[tuple[str, str, int | torch.Tensor]] = []
    on_device: dict[torch.device, list[torch.Tensor]] = {}
    for name, tensor in named:
        bits: int | torch.Tensor
        if type(tensor) in _PLAIN and tensor.is_cpu and _is_dense(tensor):
            bits = digest_at(tensor.data_ptr(), tensor.numel(), tensor.dtype.itemsize)
        elif (words := _words(tensor)) is None:
            continue
        elif words.is_cpu:
            bits = digest_at(words.data_ptr(), words.numel(), words.dtype.itemsize)
        else:
            bits = _on_device(words)
            on_device.setdefault(words.device, []).append(bits)
        found.append((name, f"{str(tensor.dtype).removeprefix('torch.')}{[*tensor.shape]}", bits))
    # One copy from each device.
    copies = {device: iter(torch.stack(sums).tolist()) for device, sums in on_device.items()}
    return [
        Digest(name, kind, next(copies[bits.device]) if isinstance(bits, torch.Tensor) else bits)
        for name, kind, bits in found
    ]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its memory holds its elements, in C order."""
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return strided and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _words(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the elements in C order, as integers of at most 32 bits."""
    tensor = tensor.detach()
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not plain or tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
        return flat.view(_WORDS.get(flat.dtype.itemsize, torch.int32))


def _on_device(words: torch.Tensor) -> torch.Tensor:
    """Return what `digest` does, without waiting for the device."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for begin in range(0, len(words), CHUNK):
        part = words[begin : begin + CHUNK]
        products = part.to(torch.int64).mul_(_factors(words.device)[: len(part)])
        total = total * CHAIN + products.sum()
    return total


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(factors()).to(device)
