"""The common part of backends without sparse gradients and own graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hororing._adapters.optimizer_options import Settings
from hororing._requests import handles as request_handles


def reduce_all(
    verbs: Any,
    tensors: Sequence[Any],
    names: Sequence[str],
    groups: Sequence[Sequence[int]],
    settings: Settings,
) -> list[Any]:
    """Reduce tensors by the asynchronous verbs of a module such as hororing.torch.

    All are started, then waited for; an error is raised once nothing is in flight.
    """
    grouped = {at for group in groups for at in group}
    parts = [*groups, *([at] for at in range(len(tensors)) if at not in grouped)]
    results = list(tensors)
    weight = None if settings.weight is None else float(settings.weight)
    handles: list[int] = []
    try:
        for part in parts:
            name = names[part[0]] if len(part) == 1 else f"{names[part[0]]}+{len(part) - 1}"
            handle = verbs.grouped_allreduce_async(
                [tensors[at] for at in part], None, name, settings.op, *settings.factors,
                settings.process_set, weight=weight,
            )  # fmt: skip
            handles.append(handle)
    except BaseException:
        for handle in handles:
            request_handles.abandon(handle, None)
        raise
    for part, reduced in zip(parts, request_handles.wait_all(handles), strict=True):
        for at, result in zip(part, reduced, strict=True):
            results[at] = result
    return results
