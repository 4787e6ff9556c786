"""Batches of a pipeline on a device, copied while the batch before is worked on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from hororing.data.pipeline import Pipeline


def on_device(
    pipeline: Pipeline,
    items: Iterable[Any],
    device: torch.device | str,
    *,
    transform: Callable[[Any], Any] | None = None,
    buffers: int = 2,
) -> Iterator[Any]:
    """Begin an epoch of a pipeline: yield its results as tensors on a device, in order.

    NumPy arrays within tuples, lists and dicts become tensors; everything else stays as it is.

    On CUDA a result goes from shared memory to pinned memory, and from there to the device on a
    stream of its own, `buffers` - 1 batches ahead of what is yielded; the current stream waits for
    it, this process does not. On the CPU it is copied once, out of shared memory.

    Parameters
    ----------
    pipeline, items : of `hororing.data.pipeline.Pipeline`, which also says what is raised.
    transform : called with every batch on the device, on that stream: `Normalize`, say.
    buffers : batches on the device at a time, that which is worked on included; at least 1.
    """
    if buffers < 1:
        raise ValueError(f"on_device: buffers={buffers} must be at least 1")
    device = torch.device(device)
    change = transform if transform is not None else _same
    if device.type != "cuda":
        return (change(_moved(each, device)) for each in pipeline(items))
    return _ahead(pipeline(items, held=1), device, change, buffers)


def _ahead(
    results: Iterator[Any], device: torch.device, transform: Callable[[Any], Any], buffers: int
) -> Iterator[Any]:
    make_stream: Any = torch.cuda.Stream  # torch declares no types
    stream = make_stream(device)
    waiting: deque[tuple[Any, Any]] = deque()

    def oldest() -> Any:
        batch, event = waiting.popleft()
        current = torch.cuda.current_stream(device)
        current.wait_event(event)
        _each(batch, lambda tensor: tensor.record_stream(current))
        return batch

    for result in results:
        with torch.cuda.stream(stream):
            batch = transform(_moved(result, device))
            waiting.append((batch, stream.record_event()))
        if len(waiting) == buffers:
            yield oldest()
    while waiting:
        yield oldest()


def _same(batch: Any) -> Any:
    return batch


def _moved(item: Any, device: torch.device) -> Any:
    if isinstance(item, np.ndarray):
        tensor = torch.from_numpy(item)
        if device.type == "cuda":
            # The allocator of pinned memory knows until when the copy needs it.
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(device)
    return _mapped(item, lambda part: _moved(part, device))


def _each(item: Any, act: Callable[[torch.Tensor], object]) -> None:
    if isinstance(item, torch.Tensor):
        if item.is_cuda:
            act(item)
        return
    _mapped(item, lambda part: _each(part, act))


def _mapped(item: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(item, dict):
        return {key: change(part) for key, part in item.items()}
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*map(change, item))
    if isinstance(item, (tuple, list)):
        return type(item)(map(change, item))
    return item
